"""The CUDA backend in numba-cuda's simulator and as PTX. Run: NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/cuda."""
