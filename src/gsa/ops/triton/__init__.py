"""The GPU engine: kernels in Triton, for NVIDIA and AMD; on a CPU they run in Triton's interpreter, for tests.

The folder jit/ holds the kernels, which Triton compiles. The modules beside it are ordinary Python: they choose sizes,
allocate tensors and launch the kernels.
"""
