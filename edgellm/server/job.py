"""What every dialect is translated into, and what every answer is translated from."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Delta", "Finish", "Job", "OutputFormat", "ToolCall", "merged", "new_id"]

_ALPHABET = string.ascii_lowercase + string.digits


def new_id(prefix: str, length: int = 24) -> str:
    """A fresh random name such as `call_x3k9...`."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(length))


@dataclass(frozen=True)
class OutputFormat:
    """A constraint on the answer. `kind`: `json` (any object), `schema`, `regex`, `lark` or `gbnf`."""

    kind: str
    value: Any = None


@dataclass(frozen=True)
class Job:
    """One request, whoever's dialect it came in. Either `messages` or `prompt` is set.

    `messages` are in the form chat templates read: role, content (str), and where given reasoning_content,
    tool_calls (arguments as an object), name and tool_call_id.
    """

    model: str
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    """Text or ids that go to the model as they are (raw, or fill-in-the-middle with `suffix`)."""
    suffix: str | None = None
    context: tuple[int, ...] = ()
    """Ids put in front of the prompt (`context` of /api/generate)."""
    template: str | None = None
    system: str | None = None
    """Overrides of the model's own template and system text."""
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    """`auto`, `none`, `required`, or `=NAME` for one named tool."""
    think: bool | str | None = None
    """None: as the model does by itself."""
    think_if_able: bool = False
    """Whether a model without thought answers all the same, where `think` asks for it."""
    format: OutputFormat | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """`SamplingParams` fields that the request sets."""
    num_ctx: int | None = None
    truncate: bool = False
    """Whether whole oldest turns may be dropped to fit the context."""
    count: int = 1
    """How many answers (`n`)."""
    echo: bool = False
    """Whether each answer begins with the prompt."""
    keep_alive: float | None = None


@dataclass(frozen=True)
class ToolCall:
    """A call the model made. `arguments` is the parsed object."""

    index: int
    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=lambda: new_id("call_", 8))


@dataclass(frozen=True)
class Finish:
    """The end of one answer. Times in seconds."""

    reason: str
    """`stop` or `length`."""
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    reasoning_tokens: int = 0
    miss_reason: str | None = None
    """Why a prefix that was expected in the cache was not there."""
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    ids: tuple[int, ...] = ()
    """Prompt and answer: what /api/generate hands back as `context`."""
    truncated: tuple[int, int] | None = None
    """Messages and tokens dropped from the front of the chat."""
    stop: str | None = None
    """The stop string that ended the answer: the request's or the model's own."""


@dataclass(frozen=True)
class Delta:
    """The next piece of answer number `index`. Texts are whole characters; the last delta carries `finish`."""

    index: int = 0
    content: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[Any, ...] = ()
    """`TokenLogprobs`, where the request asked for them."""
    finish: Finish | None = None
    prompt_tokens: int = 0
    """Tokens of the prompt; on an answer's first delta."""


def merged(deltas: list[Delta]) -> Delta:
    """All pieces of one answer as one."""
    return Delta(
        index=deltas[0].index if deltas else 0,
        content="".join(delta.content for delta in deltas),
        thinking="".join(delta.thinking for delta in deltas),
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish=next((delta.finish for delta in deltas if delta.finish is not None), None),
    )
