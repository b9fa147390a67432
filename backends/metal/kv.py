"""Paged KV cache in MLX arrays of one row per slot: (n_blocks * block_size, n_kv_heads, dim).

Rows are written by slice update. No other reference to a page array may be alive when a step is evaluated: then MLX
donates the buffer and the update happens in place, without copying the cache. MLX touches every byte it allocates, and
a pool may be most of the machine's memory, so the arrays start small and double as higher blocks are written; block
pools give out the lowest numbers first."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from edgellm.backends.base import KVPages, KVSpec
from edgellm.errors import RequestError

__all__ = ["MetalKV"]

FIRST_BLOCKS = 64
"""Blocks a cache starts with: 2048 positions of 32."""
GROUP = 32
"""Values per scale of a q8_0 cache."""


class _Rows:
    """K or V rows of one layer: values, and for q8_0 one float16 scale per 32 values."""

    def __init__(self, n_slots: int, n_heads: int, dim: int, kv_type: str):
        dtype = {"f32": mx.float32, "f16": mx.float16, "q8_0": mx.int8}[kv_type]
        self.values = mx.zeros((n_slots, n_heads, dim), dtype=dtype)
        self.scales = mx.zeros((n_slots, n_heads, dim // GROUP), dtype=mx.float16) if kv_type == "q8_0" else None

    def write(self, slots: mx.array, rows: mx.array) -> None:
        if self.scales is None:
            self.values[slots] = rows.astype(self.values.dtype)
            return
        groups = rows.reshape(*rows.shape[:-1], -1, GROUP)
        scale = mx.max(mx.abs(groups), axis=-1) / 127
        wide = scale[..., None]
        q = mx.where(wide > 0, mx.round(groups / mx.maximum(wide, 1e-30)), 0)
        self.values[slots] = mx.clip(q, -127, 127).astype(mx.int8).reshape(*rows.shape)
        self.scales[slots] = scale.astype(mx.float16)

    def read(self, slots: mx.array) -> mx.array:
        """float32 (len(slots), n_heads, dim)."""
        values = self.values[slots].astype(mx.float32)
        if self.scales is None:
            return values
        groups = values.reshape(*values.shape[:-1], -1, GROUP)
        return (groups * self.scales[slots].astype(mx.float32)[..., None]).reshape(*values.shape)

    def grow(self, n_slots: int) -> None:
        self.values = _longer(self.values, n_slots)
        if self.scales is not None:
            self.scales = _longer(self.scales, n_slots)

    def arrays(self) -> list[mx.array]:
        return [self.values] if self.scales is None else [self.values, self.scales]

    def set_arrays(self, arrays: list[mx.array]) -> None:
        self.values = arrays[0]
        if self.scales is not None:
            self.scales = arrays[1]


def _longer(rows: mx.array, n_slots: int) -> mx.array:
    """The rows with zeros after them, made now, so that no two arrays are held twice at once."""
    grown = mx.concatenate([rows, mx.zeros((n_slots - rows.shape[0], *rows.shape[1:]), dtype=rows.dtype)])
    mx.eval(grown)
    return grown


class MetalKV(KVPages):
    """K and V of one layer."""

    def __init__(self, spec: KVSpec, n_blocks: int):
        if spec.kv_type == "q8_0" and (spec.k_dim % GROUP or spec.v_dim % GROUP):
            raise RequestError(f"kv_type q8_0 needs head sizes that 32 divides, not {spec.k_dim} and {spec.v_dim}")
        self.spec = spec
        self.n_blocks = n_blocks
        self._held = min(n_blocks, FIRST_BLOCKS)
        n_slots = self._held * spec.block_size
        self.k = _Rows(n_slots, spec.n_kv_heads, spec.k_dim, spec.kv_type)
        self.v = _Rows(n_slots, spec.n_kv_heads, spec.v_dim, spec.kv_type)
        mx.eval(self.arrays())  # a lazy array belongs to this thread; steps run on the engine's

    def reserve(self, n_blocks: int) -> None:
        """Make room for blocks 0 .. n_blocks - 1."""
        if n_blocks > self._held:
            self._held = min(self.n_blocks, max(n_blocks, 2 * self._held))
            for rows in (self.k, self.v):
                rows.grow(self._held * self.spec.block_size)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(int(a.nbytes) for rows in (self.k, self.v) for a in rows.arrays())

    def arrays(self) -> list[mx.array]:
        """Every page array, to be evaluated with the step that wrote them."""
        return self.k.arrays() + self.v.arrays()

    def _slots(self, block: int) -> slice:
        if not 0 <= block < self.n_blocks:
            raise IndexError(f"block {block} of {self.n_blocks}")
        self.reserve(block + 1)
        return slice(block * self.spec.block_size, (block + 1) * self.spec.block_size)

    def read_block(self, block: int) -> bytes:
        """Values then scales, K then V."""
        slots = self._slots(block)
        return b"".join(np.array(a[slots]).tobytes() for a in self.arrays())

    def write_block(self, block: int, data: bytes) -> None:
        """Inverse of `read_block`."""
        slots, at = self._slots(block), 0
        for rows in (self.k, self.v):
            updated = []
            for array in rows.arrays():
                shape = (self.spec.block_size, *array.shape[1:])
                like = np.zeros(shape, np.array(array[:0]).dtype)
                part = np.frombuffer(data, like.dtype, like.size, at).reshape(shape)
                at += like.nbytes
                array[slots] = mx.array(part)
                updated.append(array)
            rows.set_arrays(updated)
        mx.eval(self.arrays())

    def copy_block(self, source: int, target: int) -> None:
        """Copy the rows of one block."""
        a, b = self._slots(source), self._slots(target)
        for rows in (self.k, self.v):
            updated = []
            for array in rows.arrays():
                array[b] = array[a]
                updated.append(array)
            rows.set_arrays(updated)
        mx.eval(self.arrays())
