"""How a model thinks, calls tools and is constrained: template arguments, reply parser and grammar of one job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgellm.chat.grammar import GrammarCompiler
from edgellm.errors import RequestError
from edgellm.server.forced_calls import ForcedCall, calls_schema
from edgellm.server.job import Job, Piece
from edgellm.server.manager import LoadedModel

__all__ = ["Style", "reply_style"]


class PlainParser:
    """For replies without markup: all text is content."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        return [Piece(content=text)]

    def finish(self) -> list[Piece]:
        """What was held back."""
        return []


@dataclass(frozen=True)
class Style:
    """One job's way of talking with one model."""

    job: Job
    grammars: GrammarCompiler
    template_kwargs: dict[str, Any]

    @property
    def forces_call(self) -> bool:
        """Whether the reply must be a tool call."""
        return self.job.tool_choice not in ("auto", "none")

    def parser(self, ids: list[int]) -> Callable[[], Any]:
        """Makes the parser for replies to the prompt `ids`."""
        return ForcedCall if self.forces_call else PlainParser

    def grammar(self, ids: list[int]) -> Callable[[], Any] | None:
        """The mask maker of the job's constraint; None for free text. Raises GrammarError."""
        if self.forces_call:
            return self.grammars.json_schema(calls_schema(self.job.tools, self.job.tool_choice))
        wanted = self.job.format
        if wanted is None:
            return None
        if wanted.kind == "json":
            return self.grammars.json_object()
        makers = {"schema": self.grammars.json_schema, "regex": self.grammars.regex}
        return makers.get(wanted.kind, self.grammars.lark)(wanted.value)


def reply_style(job: Job, loaded: LoadedModel) -> Style:
    """The style of a job. Raises RequestError when it asks for tools or thought that the model does not have."""
    template, record = loaded.llm.template, loaded.record
    if job.tools and job.tool_choice != "none" and not template.supports_tools:
        raise RequestError(f"{record.name} does not support tools")
    if job.think and not template.supports_thinking:
        raise RequestError(f'"{job.model}" does not support thinking')
    return Style(job, loaded.grammars, _template_kwargs(job.think) if template.supports_thinking else {})


def _template_kwargs(think: bool | str | None) -> dict[str, Any]:
    """The names that families' templates use for the same switch."""
    wanted = think is not False
    kwargs: dict[str, Any] = {"enable_thinking": wanted, "thinking": wanted}
    if isinstance(think, str):
        kwargs["reasoning_effort"] = "high" if think == "max" else think
    return kwargs
