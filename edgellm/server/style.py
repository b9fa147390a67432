"""How a model thinks, calls tools and is constrained: template arguments, reply parser and grammar of one job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgellm.errors import RequestError
from edgellm.server.catalog import ModelRecord
from edgellm.server.job import Job

__all__ = ["Piece", "Style", "reply_style"]


@dataclass(frozen=True)
class Piece:
    """A piece of reply text, sorted. `calls`: (name, arguments) pairs."""

    content: str = ""
    thinking: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


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
    llm: Any
    template_kwargs: dict[str, Any]

    def parser(self, ids: list[int]) -> Callable[[], Any]:
        """Makes the parser for replies to the prompt `ids`."""
        return PlainParser

    def grammar(self, ids: list[int]) -> Callable[[], Any] | None:
        """The mask maker of the job's constraint; None for free text. Raises GrammarError."""
        return None


def reply_style(job: Job, record: ModelRecord, llm: Any) -> Style:
    """The style of a job. Raises RequestError when it asks for tools or thought that the model does not have."""
    template = llm.template
    if job.tools and job.tool_choice != "none" and not template.supports_tools:
        raise RequestError(f"{record.name} does not support tools")
    if job.think and not template.supports_thinking:
        raise RequestError(f'"{job.model}" does not support thinking')
    return Style(job, llm, _template_kwargs(job.think) if template.supports_thinking else {})


def _template_kwargs(think: bool | str | None) -> dict[str, Any]:
    """The names that families' templates use for the same switch."""
    wanted = think is not False
    kwargs: dict[str, Any] = {"enable_thinking": wanted, "thinking": wanted}
    if isinstance(think, str):
        kwargs["reasoning_effort"] = "high" if think == "max" else think
    return kwargs
