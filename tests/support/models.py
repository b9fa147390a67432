"""Running a model without an engine: one batch from token ids, blocks in scrambled order, logits or greedy ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import Backend, Batch, KVPages, KVSpec
from edgellm.config import BLOCK_SIZE
from edgellm.models.config import ModelConfig

__all__ = ["Runner", "make_batch"]


def make_batch(
    ids: Sequence[Sequence[int]],
    starts: Sequence[int],
    tables: Sequence[npt.NDArray[np.int32]],
    output_rows: Sequence[int] | None = None,
    variants: Sequence[int] | None = None,
) -> Batch:
    """Sequence s adds `ids[s]` from position `starts[s]` on. All rows are output rows unless given."""
    lens = [len(x) for x in ids]
    n = sum(lens)
    positions = [np.arange(start, start + len(x)) for x, start in zip(ids, starts, strict=True)]
    rows = range(n) if output_rows is None else output_rows
    return Batch(
        ids=np.concatenate([np.asarray(x, np.int32) for x in ids]),
        positions=np.concatenate(positions).astype(np.int32),
        seq_starts=np.cumsum([0, *lens]).astype(np.int32),
        context_lens=np.array([start + n for start, n in zip(starts, lens, strict=True)], np.int32),
        block_tables=tuple(tables),
        output_rows=np.array(rows, np.int32),
        rope_variants=np.repeat(np.array(variants or [0] * len(lens), np.int32), lens),
    )


class Runner:
    """One sequence on one model, with its own cache of `n_ctx` positions."""

    def __init__(self, model: Any, backend: Backend, kv_type: str = "f32", n_ctx: int = 512, seed: int = 0):
        self.model, self.backend, self.config = model, backend, model.config
        self.n_blocks = -(-n_ctx // BLOCK_SIZE)
        self.kv = new_kv(self.config, backend, kv_type, self.n_blocks + 1)
        order = np.random.default_rng(seed).permutation(self.n_blocks).astype(np.int32) + 1
        self.tables = [order[None, :]] * len(self.config.cache_groups)
        self.position = 0

    def run(self, ids: Sequence[int], rows: Sequence[int] | None = None, variant: int = 0) -> npt.NDArray[np.float32]:
        """Add `ids`; logits (n, vocab) of all of them, or of the given `rows`."""
        batch = make_batch([ids], [self.position], self.tables, rows, [variant])
        self.position += len(ids)
        return self.backend.execute(lambda b: self.model.forward(b, self.kv), batch)

    def logits(self, ids: Sequence[int], variant: int | None = None) -> npt.NDArray[np.float32]:
        """Logits of a whole new sequence in one step."""
        self.position = 0
        return self.run(ids, variant=self.config.rope_variant(len(ids)) if variant is None else variant)

    def greedy(self, prompt: Sequence[int], n: int, variant: int | None = None) -> list[int]:
        """`n` tokens after the prompt, each the one with the highest logit."""
        self.position = 0
        chosen = self.config.rope_variant(len(prompt) + n) if variant is None else variant
        out = [int(self.run(prompt, rows=[len(prompt) - 1], variant=chosen)[0].argmax())]
        while len(out) < n:
            out.append(int(self.run(out[-1:], variant=chosen)[0].argmax()))
        return out


def new_kv(config: ModelConfig, backend: Backend, kv_type: str, n_blocks: int) -> list[KVPages]:
    """One cache per layer."""
    return [
        backend.new_kv(
            KVSpec(config.n_kv_heads, config.k_dim, config.v_dim, kv_type, BLOCK_SIZE, config.group_of(layer), layer),
            n_blocks,
        )
        for layer in range(config.n_layers)
    ]
