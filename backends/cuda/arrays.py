"""Device memory: arrays with a shape, given back to a pool when the last handle dies; weights; the paged cache."""

from __future__ import annotations

import bisect
import math
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cuda

from edgellm.backends.base import GGMLType, KVPages, KVSpec
from edgellm.errors import RequestError

__all__ = ["CudaArray", "CudaKV", "CudaWeight", "Pool"]


class Pool:
    """Free device buffers by type and length: a step asks for the same sizes again and again, and cudaMalloc is slow.
    A free buffer up to twice as long as asked for will do, so that prompts of all lengths do not keep one each."""

    def __init__(self) -> None:
        self._free: dict[str, list[Any]] = {}

    def take(self, shape: tuple[int, ...], dtype: str = "float32") -> CudaArray:
        """An uninitialised array; its buffer comes back when the handle dies (kernels run in stream order)."""
        size, free = max(1, math.prod(shape)), self._free.setdefault(dtype, [])
        at = bisect.bisect_left(free, size, key=_size)
        found = at < len(free) and _size(free[at]) <= 2 * size
        data = free.pop(at) if found else cuda.device_array(size, np.dtype(dtype))
        array = CudaArray(data, shape)
        weakref.finalize(array, _insert, free, data)
        return array


def _size(data: Any) -> int:
    return int(data.size)


def _insert(free: list[Any], data: Any) -> None:
    free.insert(bisect.bisect_left(free, _size(data), key=_size), data)


class CudaArray:
    """A 1-D device buffer seen as `shape`."""

    def __init__(self, data: Any, shape: tuple[int, ...], owner: CudaArray | None = None):
        self.data, self.shape = data, shape
        self._owner = owner

    @property
    def size(self) -> int:
        """Values."""
        return math.prod(self.shape)

    def reshape(self, *shape: int) -> CudaArray:
        """The same buffer under another shape (one -1 allowed)."""
        if -1 in shape:
            known = -math.prod(shape)
            shape = tuple(self.size // known if s == -1 else s for s in shape)
        return CudaArray(self.data, shape, owner=self)


class CudaWeight:
    """The file's bytes on the device; 1-D tensors as float32 in `dense`."""

    def __init__(self, kind: GGMLType, shape: tuple[int, ...], data: Any, dense: Any | None):
        self.kind, self.shape, self.data, self.dense = kind, shape, data, dense


class CudaKV(KVPages):
    """K and V of one layer, one row per slot: (n_blocks * block_size, n_kv_heads, dim)."""

    def __init__(self, spec: KVSpec, n_blocks: int):
        self.spec, self.n_blocks = spec, n_blocks
        self.quantised = spec.kv_type == "q8_0"
        if self.quantised and (spec.k_dim % 32 or spec.v_dim % 32):
            raise RequestError(f"kv_type q8_0 needs head sizes that 32 divides, not {spec.k_dim} and {spec.v_dim}")
        dtype = {"f32": np.float32, "f16": np.float16, "q8_0": np.int8}[spec.kv_type]
        slots = n_blocks * spec.block_size * spec.n_kv_heads
        self.k, self.v = cuda.device_array(slots * spec.k_dim, dtype), cuda.device_array(slots * spec.v_dim, dtype)
        groups = (slots * spec.k_dim // 32, slots * spec.v_dim // 32) if self.quantised else (1, 1)
        self.ks, self.vs = (cuda.device_array(n, np.float16) for n in groups)

    def _parts(self, block: int) -> list[Any]:
        """The slices of one block."""
        if not 0 <= block < self.n_blocks:
            raise IndexError(f"block {block} of {self.n_blocks}")
        rows = self.spec.block_size * self.spec.n_kv_heads
        sizes = [(self.k, rows * self.spec.k_dim), (self.v, rows * self.spec.v_dim)]
        if self.quantised:
            sizes += [(self.ks, rows * self.spec.k_dim // 32), (self.vs, rows * self.spec.v_dim // 32)]
        return [array[block * n : (block + 1) * n] for array, n in sizes]

    def read_block(self, block: int) -> bytes:
        """K, V, then scales."""
        return b"".join(part.copy_to_host().tobytes() for part in self._parts(block))

    def write_block(self, block: int, data: bytes) -> None:
        """Inverse of `read_block`."""
        at = 0
        for part in self._parts(block):
            values: npt.NDArray[Any] = np.frombuffer(data, part.dtype, part.size, at)
            part.copy_to_device(np.ascontiguousarray(values))
            at += values.nbytes

    def copy_block(self, source: int, target: int) -> None:
        """Device to device."""
        for a, b in zip(self._parts(source), self._parts(target), strict=True):
            b.copy_to_device(a)
