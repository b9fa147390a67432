"""The optional CUDA backend on numba-cuda."""
