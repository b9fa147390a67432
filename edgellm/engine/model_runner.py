"""The one place where the schedule's ints become a ragged batch, and where blocks become bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import Array, Backend, Batch, KVPages, KVSpec, Pass
from edgellm.engine.request import Task
from edgellm.engine.scheduler import Schedule, ScheduledRequest
from edgellm.models.config import ModelConfig

__all__ = ["Model", "ModelRunner", "Runner", "RunnerPass", "build_batch"]

Rows = npt.NDArray[np.float32]


class RunnerPass(Protocol):
    """A schedule that is computed in parts."""

    def advance(self, seconds: float) -> bool:
        """Compute for about that long; True when nothing is left."""

    def rows(self) -> list[Rows]:
        """What `Runner.run` would have returned, once nothing is left."""


class Runner(Protocol):
    """What the engine needs of a model. `tests/support/scripted.py` has one without weights."""

    can_pause: bool
    """Whether `begin` works."""

    def run(self, schedule: Schedule) -> list[Rows]:
        """Compute a step. One float32 array per item, (num_output_rows, vocab) logits, or (.., dim) hidden states
        where the task says so. Rows of the cache are written for all scheduled tokens. Logits to choose from may be
        memory that the next step overwrites, and the schedule's `picks` are set where the backend finds them: of each
        output row the largest logit and its id."""

    def begin(self, schedule: Schedule) -> RunnerPass:
        """As `run`, in parts: nothing is computed yet. Items want either hidden states or logits. Other schedules may
        run before it is done, if they do not touch its blocks."""

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy a block's rows in all layers of a cache group."""

    def read_block(self, group: int, block: int) -> bytes:
        """A block's rows in all layers of a cache group; valid for `write_block` of an equal runner."""

    def write_block(self, group: int, block: int, data: bytes) -> None:
        """Overwrite a block with what `read_block` gave."""

    def touch_block(self, group: int, block: int) -> None:
        """Take the memory of a block that was never used, in all layers of a cache group."""

    def close(self) -> None:
        """Give back threads and memory. Idempotent."""


class Model(Protocol):
    """What `models.registry.load_model` returns."""

    config: ModelConfig

    def forward(self, batch: Batch, kv: Sequence[KVPages]) -> Array:
        """Logits of the batch's output rows."""

    def hidden(self, batch: Batch, kv: Sequence[KVPages]) -> Array:
        """Hidden states of the batch's output rows."""


class ModelRunner:
    """Runs a model on a backend with one set of KV pages per layer."""

    def __init__(self, model: Model, backend: Backend, num_blocks: Sequence[int], kv_type: str, block_size: int):
        self.model = model
        self.backend = backend
        self.can_pause = backend.can_pause
        config = model.config
        self._groups = config.cache_groups
        shape = config.n_kv_heads, config.k_dim, config.v_dim
        groups = list(map(config.group_of, range(config.n_layers)))
        specs = [
            KVSpec(*shape, kv_type, block_size, group, layer, self._groups[group].window)
            for layer, group in enumerate(groups)
        ]
        self._kv = backend.new_kvs(specs, [num_blocks[group] + 1 for group in groups])
        self._block_bytes = [len(pages.read_block(0)) for pages in self._kv]
        # Made once: a backend may keep what it recorded under the identity of the function.
        self._forward = lambda batch: model.forward(batch, self._kv)
        self._hidden = lambda batch: model.hidden(batch, self._kv)

    def run(self, schedule: Schedule) -> list[Rows]:
        """See `Runner.run`."""
        results: dict[int, Rows] = {}
        # Hidden states first: logits may lie where the next pass writes.
        for hidden in (True, False):
            items = [i for i in schedule.items if (i.request.task is Task.HIDDEN) == hidden]
            if items:
                rows, picks = self._pass(items, hidden)
                for item, (first, last) in zip(items, _ends(items), strict=True):
                    results[id(item)] = rows[first:last]
                    schedule.picks[item.request.request_id] = picks[first:last]
        return [results[id(item)] for item in schedule.items]

    def _pass(self, items: Sequence[ScheduledRequest], hidden: bool) -> tuple[Rows, Sequence[tuple[float, int]]]:
        batch = build_batch(items, len(self._groups))
        if hidden:
            return self.backend.execute(self._hidden, batch), ()
        if any(item.request.task is Task.LOGITS for item in items):  # they are kept
            return self.backend.execute(self._forward, batch), ()
        return self.backend.execute_logits(self._forward, batch)

    def begin(self, schedule: Schedule) -> RunnerPass:
        """See `Runner.begin`."""
        hidden = schedule.items[0].request.task is Task.HIDDEN
        batch = build_batch(schedule.items, len(self._groups))
        return _Begun(schedule.items, self.backend.begin(self._hidden if hidden else self._forward, batch))

    def copy_block(self, group: int, source: int, target: int) -> None:
        """See `Runner.copy_block`."""
        for layer in self._groups[group].layers:
            self._kv[layer].copy_block(source, target)

    def read_block(self, group: int, block: int) -> bytes:
        """See `Runner.read_block`."""
        return b"".join(self._kv[layer].read_block(block) for layer in self._groups[group].layers)

    def write_block(self, group: int, block: int, data: bytes) -> None:
        """See `Runner.write_block`."""
        at = 0
        for layer in self._groups[group].layers:
            size = self._block_bytes[layer]
            self._kv[layer].write_block(block, data[at : at + size])
            at += size

    def touch_block(self, group: int, block: int) -> None:
        """See `Runner.touch_block`."""
        for layer in self._groups[group].layers:
            self._kv[layer].touch_block(block)

    def close(self) -> None:
        """See `Runner.close`."""
        self._kv = []
        self._forward = self._hidden = _closed
        self.backend.close()


class _Begun:
    """A backend's pass, its rows by the items of the schedule."""

    def __init__(self, items: Sequence[ScheduledRequest], begun: Pass):
        self._items, self._begun = items, begun

    def advance(self, seconds: float) -> bool:
        return self._begun.advance(seconds)

    def rows(self) -> list[Rows]:
        rows = self._begun.result()
        return [rows[first:last] for first, last in _ends(self._items)]


def _ends(items: Sequence[ScheduledRequest]) -> list[tuple[int, int]]:
    """First and last (not included) output row of each item."""
    return list(pairwise(accumulate((item.num_output_rows for item in items), initial=0)))


def _closed(batch: Batch) -> Any:
    raise RuntimeError("the model runner is closed")


def build_batch(items: Sequence[ScheduledRequest], num_groups: int) -> Batch:
    """One ragged batch, sequences in the order of `items`."""
    ids: list[int] = []
    positions: list[int] = []
    starts, lens = [0], list[int]()
    output_rows, variants = list[int](), list[int]()
    for item in items:
        request, begin = item.request, item.request.num_computed_tokens
        end = begin + item.num_scheduled_tokens
        known = end - item.num_draft_tokens
        ids += request.token_ids[begin:known] + request.draft_ids[: item.num_draft_tokens]
        positions += range(begin, end)
        output_rows += range(len(ids) - item.num_output_rows, len(ids))
        variants += [request.rope_variant] * (end - begin)
        starts.append(len(ids))
        lens.append(end)
    return Batch(
        ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        seq_starts=np.array(starts, np.int32),
        context_lens=np.array(lens, np.int32),
        block_tables=tuple(_table([i.request.block_tables[g] for i in items]) for g in range(num_groups)),
        output_rows=np.array(output_rows, np.int32),
        rope_variants=np.array(variants, np.int32),
    )


def _table(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, blocks in zip(table, rows, strict=True):
        row[: len(blocks)] = blocks
    return table
