"""One conversation partner for `run` and `chat`: a model in this process, or one that a running server has loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Answer", "Message", "Reply", "Session", "dropped_line", "stats_line"]

Message = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """How a reply ended. Times in seconds; None where the other side does not say."""

    text: str
    finish_reason: str
    ids: list[int] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    ttft_s: float | None = None
    """From submit to the first token, without loading."""
    tpot_s: float | None = None
    """Seconds per token after the first."""
    speculation: dict[str, Any] | None = None
    truncated: dict[str, int] | None = None
    """What was dropped from the conversation to make it fit: `messages` and `tokens`."""


class Reply(Protocol):
    """An answer on its way: iterate it for pieces of text; `answer` is there once it has ended or was cancelled."""

    answer: Answer

    def __iter__(self) -> Iterator[str]: ...

    def cancel(self) -> None:
        """Stop; `answer` then holds the part that came."""


class Session(Protocol):
    """A model that answers conversations."""

    name: str
    load_s: float
    defaults: dict[str, Any]
    """Sampling that the stored model asks for, by `SamplingParams` name."""
    system: str | None
    """The stored model's system message, where this side has to send it."""
    opening: list[Message]
    """Turns that the stored model wants before the first one."""

    def reply(self, messages: list[Message], sampling: dict[str, Any], truncate: bool = False) -> Reply:
        """Answer the conversation. Too long: ContextLengthError, or with `truncate` whole oldest turns are dropped."""

    def continue_text(self, prompt: str, sampling: dict[str, Any]) -> Reply:
        """Go on with `prompt` as it stands, without the chat template."""

    def facts(self) -> dict[str, str]:
        """What `/show` prints."""

    def close(self) -> None:
        """Give back what the session holds."""


def dropped_line(truncated: dict[str, int]) -> str:
    """The line that says what `Answer.truncated` counts."""
    return f"edgellm: {truncated['messages']} old messages did not fit and were left out"


def stats_line(answer: Answer) -> str:
    """The line that `--stats` and `/set stats on` show below an answer."""
    parts = [f"{answer.prompt_tokens} prompt tokens ({answer.cached_tokens} cached)"]
    if answer.ttft_s is not None:
        parts.append(f"first token after {answer.ttft_s:.2f} s")
    speed = f", {1 / answer.tpot_s:.1f} tokens/s" if answer.tpot_s else ""
    parts.append(f"{answer.new_tokens} new tokens{speed}")
    if guesses := answer.speculation:
        drafted, accepted, speedup = (guesses[key] for key in ("drafted", "accepted", "speedup"))
        share = f"{accepted} of {drafted} guesses accepted ({accepted / drafted:.0%})" if drafted else "no guesses"
        parts.append(share + (f", {speedup:.2f} times plain decoding" if speedup and drafted else ""))
    return ", ".join(parts)
