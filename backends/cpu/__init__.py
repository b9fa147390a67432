"""The CPU backend: Numba SIMD kernels, replayed from a tape by a team of threads."""
