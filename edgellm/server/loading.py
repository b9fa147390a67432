"""From a stored model to an `LLM` within its share of the memory budget."""

from __future__ import annotations

import logging
from typing import Any

from edgellm.errors import MemoryBudgetError
from edgellm.memory import make_plan
from edgellm.server.catalog import ModelRecord
from edgellm.server.settings import ServerSettings

__all__ = ["Loader"]

_log = logging.getLogger("edgellm.server")


class Loader:
    """Makes models. `budget`: bytes for all of them together."""

    def __init__(self, settings: ServerSettings, budget: int):
        self.settings = settings
        self.budget = budget

    def __call__(self, record: ModelRecord, room: int) -> tuple[Any, int]:
        """The model, loaded within `room` bytes, and the bytes it may take.

        Raises MemoryBudgetError, GGUFError, UnsupportedModel and the like.
        """
        from edgellm.llm import LLM

        settings = self.settings
        memory = self._share(record, room)
        draft = record.draft if settings.draft is None else settings.draft
        options = {"backend": settings.backend, "threads": settings.threads, "kv_type": settings.kv_type}
        llm = LLM(record.path, ctx=settings.ctx, draft=draft, memory=memory, **options, **settings.extra)
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
        if make_plan(config, weights, self.settings.kv_type, ctx, room // 2).fits:
            return room // 2
        plan = make_plan(config, weights, self.settings.kv_type, ctx, room)
        if not plan.fits and room < self.budget:
            raise MemoryBudgetError(f"{record.name} needs {plan.total_bytes} bytes but {room} are free")
        return room
