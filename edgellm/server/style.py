"""How a model thinks, calls tools and is constrained: template arguments, reply parser and grammar of one job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgellm.chat.grammar import GrammarCompiler
from edgellm.chat.reply import PlainParser
from edgellm.chat.tools import Parser, ReplyStyle
from edgellm.errors import RequestError
from edgellm.server.forced_calls import ForcedCall, calls_schema
from edgellm.server.job import Job
from edgellm.server.manager import LoadedModel

__all__ = ["Style", "reply_style"]


@dataclass(frozen=True)
class Style:
    """One job's way of talking with one model. `replies`: None where the reply is taken as it is (raw prompts)."""

    job: Job
    grammars: GrammarCompiler
    replies: ReplyStyle | None
    template_kwargs: dict[str, Any]

    @property
    def forces_call(self) -> bool:
        """Whether the reply must be a tool call."""
        return self.job.tool_choice not in ("auto", "none")

    @property
    def shown(self) -> frozenset[int]:
        """Control tokens whose names are text for the parser."""
        return self.replies.shown if self.replies is not None else frozenset()

    def parser(self, ids: list[int]) -> Callable[[], Parser]:
        """Makes the parser for replies to the prompt `ids`."""
        replies = self.replies
        if replies is None:
            return PlainParser
        if self.forces_call:
            return lambda: ForcedCall(replies.parser(ids))
        tools = self.job.tools if self.job.tool_choice != "none" else ()
        return lambda: replies.parser(ids, tools)

    def grammar(self, ids: list[int]) -> Callable[[], Any] | None:
        """The mask maker of the job's constraint; None for free text. Raises GrammarError."""
        lead = self.replies.lead(ids, think=self.job.think is not False) if self.replies is not None else None
        if self.forces_call:
            return self.grammars.json_schema(calls_schema(self.job.tools, self.job.tool_choice), lead)
        wanted = self.job.format
        if wanted is None:
            return None
        if wanted.kind == "json":
            return self.grammars.json_object(lead)
        makers = {"schema": self.grammars.json_schema, "regex": self.grammars.regex}
        return makers.get(wanted.kind, self.grammars.lark)(wanted.value, lead)


def reply_style(job: Job, loaded: LoadedModel) -> Style:
    """The style of a job. Raises RequestError when it asks for tools or thought that the model does not have."""
    template, record = loaded.llm.template, loaded.record
    if job.tools and job.tool_choice != "none" and not template.supports_tools:
        raise RequestError(f"{record.name} does not support tools")
    if job.think and not template.supports_thinking and not job.think_if_able:
        raise RequestError(f'"{job.model}" does not support thinking')
    replies = None
    if job.messages is not None:
        replies = loaded.replies if job.template is None else ReplyStyle(job.template, loaded.llm.tokenizer)
    kwargs = _template_kwargs(job.think) if template.supports_thinking else {}
    return Style(job, loaded.grammars, replies, kwargs)


def _template_kwargs(think: bool | str | None) -> dict[str, Any]:
    """The names that families' templates use for the same switch."""
    wanted = think is not False
    kwargs: dict[str, Any] = {"enable_thinking": wanted, "thinking": wanted}
    if isinstance(think, str):
        kwargs["reasoning_effort"] = "high" if think == "max" else think
    return kwargs
