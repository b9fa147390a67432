"""Which pieces of attention a step consists of: made in numpy before each run, shared by all layers of one kind.

Rows of a sequence are cut into tiles; a tile is split by partitions when it is too large a share of the step's work
for threads to balance. Neither changes the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import AttentionSpec, Batch, KVSpec
from edgellm.backends.cpu.arena import Span
from edgellm.backends.cpu.tape import Tape
from edgellm.config import BLOCK_SIZE

__all__ = ["PARTITION", "UNIT_FIELDS", "Plan", "Tiles", "plan_of"]

PARTITION = 256
UNIT_FIELDS = 8
PAIRS = 36
"""(row, head) pairs of a prompt's tile: what keeps its scores, queries and sums in the first-level cache."""
FEW_PAIRS = 8
"""A sequence with at most this many pairs in the step (or one row) takes the kernel for few rows: the other one takes
as long for any number up to ROWS_AT_ONCE."""
SHARE = 4
"""A tile may be 1 / (SHARE * threads) of the step's work before it is split."""

Ints = npt.NDArray[np.int64]
Placed = tuple[int, int, int, int, int, int]
"""A tile (see `Plan._tiles`) and the slot of its first partial result, -1 when it is not split."""


@dataclass
class Tiles:
    """Units for one kernel: capacity for the recorded shape, ops that read them."""

    rows: int
    units: Ints
    ops: list[int] = field(default_factory=list)


class Plan:
    """Units of one step, refilled before each run."""

    def __init__(self, tape: Tape, kv: KVSpec, spec: AttentionSpec, group: int, n_threads: int):
        batch = tape.batch
        self._tape, self._window, self._causal, self._group = tape, spec.window, spec.causal, group
        self._heads, self._threads, self._table_width = kv.n_kv_heads, n_threads, batch.block_tables[kv.group].shape[1]
        self._width = (-(-kv.v_dim // 16) * 16 + 2) * 4
        self._tile, self._few = max(1, PAIRS // group), max(1, FEW_PAIRS // group)
        # A kernel that no batch of this shape can need is not recorded.
        self.few = Tiles(1 if tape.shape.decode else self._few, self._units(batch.n_seqs))
        self.many: Tiles | None = None
        if not tape.shape.decode and batch.n_tokens > self._few:
            self.many = Tiles(self._tile, self._units(batch.n_tokens // self._tile + batch.n_seqs))
        self.combine: Ints = np.zeros((batch.n_tokens * self._heads * group, UNIT_FIELDS), np.int64)
        self.combine_ops: list[int] = []
        self.cell: Ints = np.zeros(1, np.int64)
        self._laid: list[tuple[int, int, int, int, int]] = []
        self._partials: npt.NDArray[Any] = np.zeros(0, np.uint8)

    def _units(self, tiles: int) -> Ints:
        """Room for that many tiles, each split into all its partitions."""
        partitions = -(-self._table_width * BLOCK_SIZE // PARTITION)
        return np.zeros((tiles * self._heads * partitions, UNIT_FIELDS), np.int64)

    @property
    def span(self) -> Span:
        """Stands for the partials among an op's reads and writes."""
        return self.cell.ctypes.data, 8

    def fill(self, batch: Batch) -> None:
        """Lay out the units of this batch; nothing to do while no sequence has reached its next partition."""
        tiles = self._tiles(batch)
        if tiles == self._laid:
            return
        self._laid = tiles
        costs = [rows * (end - begin) for _, rows, _, begin, end in tiles]
        limit = max(1.0, sum(costs) * self._heads / (SHARE * self._threads))
        slots = 0
        few: list[Any] = []
        many: list[Any] = []
        split: list[Any] = []
        for tile, cost in zip(tiles, costs, strict=True):
            apart = cost > limit and tile[4] - tile[3] > 1
            placed = (*tile, slots if apart else -1)
            (many if self._crowded(batch, tile[2]) else few).append(placed)
            if apart:
                split.append(placed)
                slots += cost * self._heads * self._group
        self._reserve(slots)
        self._lay(self.few, few)
        if self.many is not None:
            self._lay(self.many, many)
        self._lay_combine(split)

    def _crowded(self, batch: Batch, sequence: int) -> bool:
        """Whether a sequence has more rows in this step than the kernel for few rows is meant for."""
        return int(batch.seq_starts[sequence + 1] - batch.seq_starts[sequence]) > self._few

    def _tiles(self, batch: Batch) -> list[tuple[int, int, int, int, int]]:
        """First row, number of rows, sequence, first partition, end partition."""
        starts, lengths = batch.seq_starts.tolist(), batch.context_lens.tolist()
        tiles = []
        for s, length in enumerate(lengths):
            start, stop = starts[s], starts[s + 1]
            size = self._tile if stop - start > self._few else self._few
            for first in range(start, stop, size):
                n = min(size, stop - first)
                low, high = 0, length - 1
                if self._causal:
                    high = int(batch.positions[first + n - 1])
                elif self._window:
                    high = min(high, int(batch.positions[first + n - 1]) + self._window - 1)
                if self._window:
                    low = max(0, int(batch.positions[first]) - self._window + 1)
                tiles.append((first, n, s, low // PARTITION, high // PARTITION + 1))
        return tiles

    def _lay(self, target: Tiles, tiles: list[Placed]) -> None:
        n = 0
        for first, rows, sequence, begin, end, slot in tiles:
            pairs, parts = rows * self._group, end - begin
            for head in range(self._heads):
                if slot < 0:
                    target.units[n] = (first, rows, head, sequence, begin, end, -1, 0)
                    n += 1
                    continue
                lines = target.units[n : n + parts]
                lines[:] = (first, rows, head, sequence, 0, 0, 0, 0)
                lines[:, 4] = np.arange(begin, end)
                lines[:, 6] = slot + pairs * (head * parts + np.arange(parts))
                n += parts
        # Tiles that read the same K and V come one after another, so that the second finds them in the cache.
        done = target.units[:n]
        done[:] = done[np.lexsort((done[:, 0], done[:, 4], done[:, 2], done[:, 3]))]
        for op in target.ops:
            self._tape.set_units(op, n, step=0 if all(slot >= 0 for *_, slot in tiles) else 1)

    def _lay_combine(self, tiles: list[Placed]) -> None:
        n = 0
        for first, rows, _, begin, end, slot in tiles:
            pairs, parts = rows * self._group, end - begin
            for head in range(self._heads):
                lines = self.combine[n : n + pairs]
                pair = np.arange(pairs)
                lines[:, 0] = first + pair // self._group
                lines[:, 1] = head * self._group + pair % self._group
                lines[:, 2:5] = slot + head * pairs * parts, parts, pairs
                lines[:, 5] = pair
                n += pairs
        for op in self.combine_ops:
            self._tape.set_units(op, n)

    def _reserve(self, slots: int) -> None:
        if len(self._partials) < slots * self._width + 64:
            self._partials = np.empty(2 * slots * self._width + 64, np.uint8)
            self.cell[0] = -(-self._partials.ctypes.data // 64) * 64


def plan_of(tape: Tape, kv: KVSpec, spec: AttentionSpec, group: int, n_threads: int) -> Plan:
    """The tape's plan for layers of this kind."""
    key = ("attention", kv.n_kv_heads, kv.k_dim, kv.v_dim, kv.group, group, spec.window, spec.causal)
    if key not in tape.shared:
        plan = Plan(tape, kv, spec, group, n_threads)
        tape.shared[key] = plan
        tape.replay.append(plan.fill)
    made: Plan = tape.shared[key]
    return made
