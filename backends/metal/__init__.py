"""The Apple Silicon backend on MLX, with Metal kernels."""
