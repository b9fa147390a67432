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

    def __call__(self, record: ModelRecord, room: int) -> tuple[LLM, int]:
        """The model, loaded within `room` bytes, and the bytes it may take.

        Raises MemoryBudgetError, GGUFError, UnsupportedModel and the like.
        """
        from edgellm.llm import LLM

        settings = self.settings
        memory = self._share(record, room)
        draft = settings.draft or (str(record.draft) if record.draft is not None else None)
        llm = LLM(
            record.path,
            backend=settings.backend,
            ctx=settings.ctx,
            draft=draft,
            threads=settings.threads,
            memory=memory,
            kv_type=settings.kv_type,
            template=record.template,
            max_seqs=settings.max_seqs or 64,
            max_waiting=settings.max_queue,
            name=record.name,
            **settings.extra,
        )
        return llm, memory

    def _share(self, record: ModelRecord, room: int) -> int:
        """Half of what is left where the model fits with its whole context, so that a second one finds room; else all
        of it. While other models hold memory, a model that fits only with a cut context is refused: those that idle
        then make room first."""
        from edgellm.loader import open_gguf
        from edgellm.models import registry

        with open_gguf(record.path) as gguf:
            config = registry.config_from_metadata(gguf.metadata)
            weights = gguf.nbytes
        ctx = min(self.settings.ctx or config.context_length, config.context_length)
        runtime = runtime_bytes()
        plan = make_plan(config, weights, self.settings.kv_type, ctx, room // 2, runtime_bytes=runtime)
        if plan.fits:
            enough = plan.total_bytes + (_CONTEXTS - 1) * plan.kv_bytes + _SLACK
            return room // 2 if self.settings.memory is not None else min(room // 2, enough)
        if plan.total_bytes > room and room < self.budget:
            raise MemoryBudgetError(f"{record.name} needs {plan.total_bytes} bytes but {room} are free")
        return room
