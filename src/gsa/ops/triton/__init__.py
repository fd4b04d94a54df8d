"""The GPU engine: kernels in Triton, for NVIDIA and AMD; on a CPU they run in Triton's interpreter, for tests."""
