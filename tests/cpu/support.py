"""Random batches, weights and caches that run on the reference and on the CPU backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.backends.base import Batch, KVSpec
from edgellm.config import BLOCK_SIZE
from edgellm.quants import GGMLType, QTensor


def tensor(values: np.ndarray, kind: GGMLType = GGMLType.F32) -> QTensor:
    """A float weight as a file would hold it."""
    dtype = {GGMLType.F32: np.float32, GGMLType.F16: np.float16}.get(kind)
    if dtype is None:
        assert kind == GGMLType.BF16
        data = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        data = np.ascontiguousarray(values, dtype).view(np.uint8)
    return QTensor("test.weight", kind, values.shape, data.reshape(*values.shape[:-1], -1))


class Cache:
    """Sequences with their own blocks, in random order; makes batches of their next rows."""

    def __init__(self, rng: np.random.Generator, n_seqs: int, max_len: int):
        self.blocks = -(-max_len // BLOCK_SIZE)
        self.n_blocks = n_seqs * self.blocks + 1
        self.table = (1 + rng.permutation(n_seqs * self.blocks)).reshape(n_seqs, -1).astype(np.int32)
        self.lengths = np.zeros(n_seqs, np.int64)

    def batch(self, rows: dict[int, int], advance: bool = True) -> Batch:
        """The next `rows[s]` rows of each sequence s."""
        positions = [np.arange(self.lengths[s], self.lengths[s] + n) for s, n in rows.items()]
        lengths = np.array([self.lengths[s] + n for s, n in rows.items()], np.int32)
        total = int(sum(rows.values()))
        made = Batch(
            ids=np.zeros(total, np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            seq_starts=np.concatenate([[0], np.cumsum(list(rows.values()))]).astype(np.int32),
            context_lens=lengths,
            block_tables=(self.table[list(rows)],),
            output_rows=np.arange(total, dtype=np.int32),
            rope_variants=np.zeros(total, np.int32),
        )
        if advance:
            for s, n in rows.items():
                self.lengths[s] += n
        return made


def kv_spec(kv_type: str = "f32", heads: int = 2, k_dim: int = 16, v_dim: int | None = None) -> KVSpec:
    return KVSpec(heads, k_dim, k_dim if v_dim is None else v_dim, kv_type, BLOCK_SIZE, 0)


def constant(backend: Any, values: np.ndarray) -> Any:
    """A (n, ...) activation inside a forward: the rows of a table, taken by batch.ids."""
    flat = np.ascontiguousarray(values, np.float32).reshape(len(values), -1)
    return backend.load(tensor(flat))
