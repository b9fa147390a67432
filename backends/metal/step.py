"""The fields of one step's batch on the device, each made once however many layers ask for it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgellm.backends.base import Batch, Int32Array, RopeSpec

__all__ = ["Step"]


class Step:
    """One batch. Arrays are lazy and belong to the step's graph."""

    def __init__(self, batch: Batch):
        self.batch = batch
        self._fields: dict[int, tuple[Int32Array, mx.array]] = {}
        self._arrays: dict[Any, mx.array] = {}
        self._angles: dict[int, tuple[RopeSpec, mx.array, mx.array]] = {}

    def field(self, values: Int32Array) -> mx.array:
        """A field of the batch, int32."""
        if id(values) not in self._fields:
            self._fields[id(values)] = values, mx.array(values)
        return self._fields[id(values)][1]

    @property
    def seqs(self) -> mx.array:
        """Sequence of each row, int32 (n_tokens,)."""
        if "seqs" not in self._arrays:
            self._arrays["seqs"] = mx.array(self._rows_seq())
        return self._arrays["seqs"]

    def n_blocks(self, group: int, block_size: int) -> int:
        """Blocks 0 .. n - 1 take all rows that this step writes to one cache group."""
        written = self.batch.block_tables[group][self._rows_seq(), self.batch.positions // block_size]
        return int(written.max()) + 1

    def slots(self, group: int, block_size: int) -> mx.array:
        """Cache slot of each row in one cache group, int32 (n_tokens,)."""
        key = ("slots", group, block_size)
        if key not in self._arrays:
            positions, table = self.batch.positions, self.batch.block_tables[group]
            slots = table[self._rows_seq(), positions // block_size] * block_size + positions % block_size
            self._arrays[key] = mx.array(slots.astype(np.int32))
        return self._arrays[key]

    def angles(self, spec: RopeSpec) -> tuple[mx.array, mx.array]:
        """cos and sin of each row's angles times its magnitude, float32 (n_tokens, 1, n_dims / 2)."""
        if id(spec) not in self._angles:
            variants = self.batch.rope_variants
            angle = mx.array(self.batch.positions.astype(np.float32))[:, None] * mx.array(spec.inv_freq[variants])
            size = mx.array(spec.magnitude[variants])[:, None]
            cos, sin = (mx.cos(angle) * size)[:, None], (mx.sin(angle) * size)[:, None]
            self._angles[id(spec)] = spec, cos, sin
        return self._angles[id(spec)][1:]

    def _rows_seq(self) -> npt.NDArray[np.int32]:
        return np.repeat(np.arange(self.batch.n_seqs, dtype=np.int32), np.diff(self.batch.seq_starts))
