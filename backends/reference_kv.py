"""The reference backend's paged cache: plain numpy arrays (blocks, positions, heads, dims), one pair per layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import KVPages, KVSpec
from edgellm.errors import RequestError

__all__ = ["ReferenceKV", "quantise_q8_0"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Rows = npt.NDArray[Any]

GROUP = 32


def quantise_q8_0(x: Floats) -> npt.NDArray[np.uint8]:
    """Last axis in groups of 32 (the last one filled up with zeros): f16 d = max|x| / 127, then 32 int8 round(x / d).

    Returns uint8 (..., groups * 34), the Q8_0 layout.
    """
    groups = -(-x.shape[-1] // GROUP)
    padded = np.zeros((*x.shape[:-1], groups * GROUP), np.float32)
    padded[..., : x.shape[-1]] = x
    padded = padded.reshape(*x.shape[:-1], groups, GROUP)
    d = np.abs(padded).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, d, out=np.zeros_like(d), where=d > 0)
    scaled = padded * inverse
    q = (np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))).astype(np.int8)
    blocks = np.concatenate([d.astype(np.float16).view(np.uint8), q.view(np.uint8)], axis=-1)
    return blocks.reshape(*x.shape[:-1], groups * (GROUP + 2))


def _restore_q8_0(rows: npt.NDArray[np.uint8], dim: int) -> Floats:
    blocks = rows.reshape(*rows.shape[:-1], -1, GROUP + 2)
    d = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    x = d * np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return x.reshape(*rows.shape[:-1], -1)[..., :dim]


class ReferenceKV(KVPages):
    """K and V of one layer. Memory is zero pages until a block is written."""

    def __init__(self, spec: KVSpec, n_blocks: int):
        self.spec = spec
        self.n_blocks = n_blocks
        self.k = self._reserve(spec.k_dim)
        self.v = self._reserve(spec.v_dim)

    def _reserve(self, dim: int) -> Rows:
        shape = (self.n_blocks, self.spec.block_size, self.spec.n_kv_heads)
        if self.spec.kv_type == "q8_0":
            return np.zeros((*shape, -(-dim // GROUP) * (GROUP + 2)), np.uint8)
        dtypes: dict[str, type[Any]] = {"f32": np.float32, "f16": np.float16}
        if self.spec.kv_type not in dtypes:
            raise RequestError(f"kv_type must be f32, f16 or q8_0, not {self.spec.kv_type!r}")
        return np.zeros((*shape, dim), dtypes[self.spec.kv_type])

    def write(self, table: Ints, positions: Ints, k: Floats, v: Floats) -> None:
        """Put the rows of one sequence at their positions."""
        blocks, offsets = table[positions // self.spec.block_size], positions % self.spec.block_size
        for pages, rows in ((self.k, k), (self.v, v)):
            if self.spec.kv_type == "q8_0":
                pages[blocks, offsets] = quantise_q8_0(rows)
            else:
                pages[blocks, offsets] = rows

    def read(self, table: Ints, start: int, stop: int) -> tuple[Floats, Floats]:
        """Positions start..stop of one sequence: float32 k (n, heads, k_dim) and v (n, heads, v_dim)."""
        positions = np.arange(start, stop)
        blocks, offsets = table[positions // self.spec.block_size], positions % self.spec.block_size
        k, v = self.k[blocks, offsets], self.v[blocks, offsets]
        if self.spec.kv_type == "q8_0":
            return _restore_q8_0(k, self.spec.k_dim), _restore_q8_0(v, self.spec.v_dim)
        return k.astype(np.float32), v.astype(np.float32)

    def read_block(self, block: int) -> bytes:
        data: bytes = self.k[block].tobytes() + self.v[block].tobytes()
        return data

    def write_block(self, block: int, data: bytes) -> None:
        n_k = self.k[block].nbytes
        if len(data) != n_k + self.v[block].nbytes:
            raise ValueError(f"a block is {n_k + self.v[block].nbytes} bytes, not {len(data)}")
        for pages, part in ((self.k, data[:n_k]), (self.v, data[n_k:])):
            pages[block] = np.frombuffer(part, pages.dtype).reshape(pages[block].shape)

    def copy_block(self, source: int, target: int) -> None:
        self.k[target] = self.k[source]
        self.v[target] = self.v[source]
