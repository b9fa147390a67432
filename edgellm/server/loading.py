"""From a stored model to an `LLM` within its share of the memory budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.errors import MemoryBudgetError
from edgellm.memory import make_plan, runtime_bytes
from edgellm.server.catalog import ModelRecord
from edgellm.server.settings import ServerSettings

if TYPE_CHECKING:
    from edgellm.llm import LLM

__all__ = ["Loader"]

_CONTEXTS = 8
"""Without a given budget a model's cache holds this many whole contexts at most: it need not fill the machine."""

_SLACK = 256 << 20
"""Bytes by which the interpreter may grow while a model is loaded."""


class Loader:
    """Makes models. `budget`: bytes for all of them together."""

    def __init__(self, settings: ServerSettings, budget: int):
        self.settings = settings
        self.budget = budget
        self._own: int | None = None
        """Bytes that the process held before the first of the models that are loaded now."""

    def __call__(self, record: ModelRecord, room: int) -> tuple[LLM, int]:
        """The model, loaded within `room` bytes, and the bytes it may take.

        Raises MemoryBudgetError, GGUFError, UnsupportedModel and the like.
        """
        others = self._held_by_others(room)
        context, shares = self._shares(record, room, others)
        for memory in shares:
            # With its whole context, or with the next share: only who has all there is gets a shorter one.
            ctx = self.settings.ctx if memory == self.budget else context
            try:
                llm = self._open(record, memory + others, ctx)
                break
            except MemoryBudgetError:  # `LLM` knows more: a draft, weights that are kept as another type
                if memory == room:
                    raise
        if room == self.budget and llm.engine.plan is not None:
            self._own = llm.engine.plan.runtime_bytes
        return llm, memory

    def _open(self, record: ModelRecord, memory: int, ctx: int | None) -> LLM:
        from edgellm.llm import LLM

        settings = self.settings
        return LLM(
            record.path,
            backend=settings.backend,
            ctx=ctx,
            draft=settings.draft or (str(record.draft) if record.draft is not None else None),
            threads=settings.threads,
            memory=memory,
            kv_type=settings.kv_type,
            template=record.template,
            max_seqs=settings.max_seqs or 64,
            max_waiting=settings.max_queue,
            name=record.name,
            **settings.extra,
        )

    def _held_by_others(self, room: int) -> int:
        """What loaded models have come to hold of their shares. `room` is without those, so a plan must not count it
        as the process's own once more."""
        if room == self.budget or self._own is None:
            return 0
        return min(max(0, runtime_bytes() - self._own), self.budget - room)

    def _shares(self, record: ModelRecord, room: int, others: int) -> tuple[int, list[int]]:
        """The model's whole context, and the shares to try: half of what is left where the model fits with its whole
        context, so that a second one finds room; then all of it. While other models hold memory, a model that fits
        only with a cut context is refused: those that idle then make room first."""
        from edgellm.loader import open_gguf
        from edgellm.models import registry

        with open_gguf(record.path) as gguf:
            config = registry.config_from_metadata(gguf.metadata)
            weights = gguf.nbytes
        context, half = self.settings.ctx or config.context_length, room // 2
        ctx = min(context, config.context_length)
        runtime = runtime_bytes() - others
        plan = make_plan(config, weights, self.settings.kv_type, ctx, half, runtime_bytes=runtime)
        if plan.fits:
            enough = plan.total_bytes + (_CONTEXTS - 1) * plan.kv_bytes + _SLACK
            first = half if self.settings.memory is not None else min(half, enough)
            return context, sorted({first, half, room})
        if plan.total_bytes > room and room < self.budget:
            raise MemoryBudgetError(f"{record.name} needs {plan.total_bytes} bytes but {room} are free")
        return context, [room]
