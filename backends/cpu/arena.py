"""Memory for what a forward pass computes: planned while a tape is recorded, reused as handles die."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALIGN", "Arena", "Buf", "Span", "Storage"]

ALIGN = 64
CHUNK = 1 << 22
Span = tuple[int, int]
"""Address and length in bytes of memory that an op touches."""


class Arena:
    """Memory for activations, shared by all tapes of a backend (only one runs at a time). Chunks never move."""

    def __init__(self) -> None:
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._index = self._offset = 0
        self._free: dict[int, deque[int]] = defaultdict(deque)
        self._rows: list[npt.NDArray[np.int64]] = []

    @property
    def nbytes(self) -> int:
        """Bytes reserved (memory is taken when it is first written)."""
        return sum(c.nbytes for c in self._chunks)

    def restart(self) -> None:
        """Begin a new recording: everything is free again."""
        self._index = self._offset = 0
        self._free.clear()

    def take(self, size: int) -> int:
        """Address of `size` bytes, 64-byte aligned; the longest-free buffer of that size, or fresh memory."""
        size = -(-max(size, 1) // ALIGN) * ALIGN
        if self._free[size]:
            return self._free[size].popleft()
        while self._index < len(self._chunks):
            chunk = self._chunks[self._index]
            start = -(-(chunk.ctypes.data + self._offset) // ALIGN) * ALIGN
            if start + size <= chunk.ctypes.data + chunk.nbytes:
                self._offset = start + size - chunk.ctypes.data
                return start
            self._index, self._offset = self._index + 1, 0
        self._chunks.append(np.empty(max(size + ALIGN, CHUNK), np.uint8))
        return self.take(size)

    def take_rows(self, count: int, fields: int) -> npt.NDArray[np.int64]:
        """A table of tape rows of so many int64, aligned to cache lines. A late thread may look at one (not work on it)
        after its tape is gone, so tables are kept for the next tape and never freed."""
        size = max(64, 1 << (count - 1).bit_length())
        for i, table in enumerate(self._rows):
            if len(table) == size:
                return self._rows.pop(i)
        return _aligned(size, fields)

    def give_back_rows(self, table: npt.NDArray[np.int64]) -> None:
        """Keep a table for the next tape."""
        self._rows.append(table)

    def give_back(self, address: int, size: int) -> None:
        """Free what `take` gave."""
        self._free[-(-max(size, 1) // ALIGN) * ALIGN].append(address)


class Storage:
    """Memory behind one or more handles; `release` hears when the last one is gone. `derived` keeps forms made from it
    once (quantised rows)."""

    def __init__(self, address: int, nbytes: int, release: Callable[[int, int], None] | None = None):
        self.address, self.nbytes, self.release = address, nbytes, release
        self.derived: dict[Any, Any] = {}

    def __del__(self) -> None:
        if self.release is not None:
            self.release(self.address, self.nbytes)


class Buf:
    """A handle on an activation: contiguous, float32 unless its user says otherwise. A length that counts rows is
    `Rows`."""

    def __init__(self, storage: Storage, shape: tuple[int, ...], size: int | None = None):
        self.storage, self.shape = storage, shape
        self.size = math.prod(shape) if size is None else size
        """Number of elements."""
        self.address = storage.address
        """Where it starts."""
        self.span: Span = storage.address, storage.nbytes
        """All of its memory."""

    @property
    def derived(self) -> dict[Any, Any]:
        """Forms made from this buffer, by any key; they live as long as it does."""
        return self.storage.derived

    def reshape(self, *shape: int) -> Buf:
        """The same memory under another shape; one length may be -1."""
        if -1 in shape:
            rest = -math.prod(shape)
            shape = tuple(self.size // rest if n == -1 else n for n in shape)
        if math.prod(map(int, shape)) != self.size:
            raise ValueError(f"cannot reshape {self.shape} to {shape}")
        return Buf(self.storage, shape, self.size)


def _aligned(rows: int, columns: int) -> npt.NDArray[np.int64]:
    memory = np.zeros(rows * columns * 8 + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + rows * columns * 8].view(np.int64).reshape(rows, columns)
