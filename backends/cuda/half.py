"""Prompt-size products on tensor cores: half-precision tiles multiplied by cuBLAS, where that library is installed.

cuBLAS is called through ctypes: one function is needed, and numba-cuda brings what finds the library (in a CUDA
toolkit or in the wheel `nvidia-cublas`). Without it prompts take the integer kernel of matmul.py."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Protocol

from numba import cuda

__all__ = ["CuBLAS", "HalfProduct", "find_cublas"]

OP_N, OP_T = 0, 1
REAL_32F, REAL_16F = 0, 2
COMPUTE_32F = 68
DEFAULT_ALGORITHM = -1


class HalfProduct(Protocol):
    """A library's matrix product on the device. `name` is shown to users."""

    name: str

    def multiply(self, w: Any, x: Any, y: Any, first: int, rows: int, n: int, m: int, k: int) -> None:
        """y[:, first : first + rows] = x (m, k) times w (rows, k) transposed; y is (m, n) float32, w and x float16."""


class CuBLAS:
    """cublasGemmEx with float32 sums. Raises OSError or RuntimeError where the library does not work."""

    name = "cuBLAS, half precision with float32 sums"

    def __init__(self, path: str):
        self._library = ctypes.CDLL(path)
        self._handle = ctypes.c_void_p()
        self._check(self._library.cublasCreate_v2(ctypes.byref(self._handle)), "cublasCreate")
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def multiply(self, w: Any, x: Any, y: Any, first: int, rows: int, n: int, m: int, k: int) -> None:
        """See HalfProduct. cuBLAS counts columns first: to it y is (n, m), w (k, rows) and x (k, m)."""
        status = self._library.cublasGemmEx(
            *(self._handle, OP_T, OP_N, rows, m, k, ctypes.byref(self._one)),
            *(_address(w), REAL_16F, k, _address(x), REAL_16F, k, ctypes.byref(self._zero)),
            *(_address(y, 4 * first), REAL_32F, n, COMPUTE_32F, DEFAULT_ALGORITHM),
        )
        self._check(status, "cublasGemmEx")

    def _check(self, status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"{what} failed with status {status}")


def _address(array: Any, offset: int = 0) -> ctypes.c_void_p:
    """Where a device array's bytes start."""
    return ctypes.c_void_p(array.__cuda_array_interface__["data"][0] + offset)


def find_cublas() -> CuBLAS | str:
    """cuBLAS, or why there is none."""
    try:
        finder = importlib.import_module("cuda.pathfinder")  # comes with numba-cuda
        cuda.current_context()  # cuBLAS binds to the context that is current when it is made
        return CuBLAS(str(finder.load_nvidia_dynamic_lib("cublas").abs_path))
    except (ImportError, OSError, RuntimeError) as error:
        return f"no cuBLAS: {str(error).strip().splitlines()[0][:120]}; pip install nvidia-cublas"
