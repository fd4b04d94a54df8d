"""What runs on the GPU: all functions here are compiled by Triton. Everything else in gsa.ops.triton is host code."""
