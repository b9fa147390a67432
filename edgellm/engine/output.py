"""What comes out: token events, completions, and the text between them with stop strings cut off."""

from __future__ import annotations

import codecs
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgellm.errors import EdgeLLMError

__all__ = ["Completion", "StreamDecoder", "TextOutput", "TokenEvent", "TokenLogprobs", "TokenText"]


class StreamDecoder(Protocol):
    """Turns ids into text as they come; never splits a character."""

    def push(self, id: int) -> str:
        """Text that this token completes, perhaps none."""

    def finish(self) -> str:
        """What is left of an unfinished character."""


class TokenText(Protocol):
    """The part of a tokenizer the engine needs."""

    eog_ids: frozenset[int]

    def stream_decoder(self, after: int | None = None, show: Container[int] = ()) -> StreamDecoder:
        """A decoder for what follows token `after`; `show`: control tokens whose names are text."""

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for in text."""


@dataclass(frozen=True)
class TokenLogprobs:
    """One token's log-softmax of the raw logits (natural log, before samplers), and the likeliest alternatives."""

    id: int
    token: str
    bytes: bytes
    logprob: float
    top: tuple[TokenLogprobs, ...] = ()


@dataclass
class Completion:
    """A finished answer. `ids` and `logprobs` are the tokens of `text`: no end token, nothing from a stop string on."""

    text: str
    ids: list[int]
    finish_reason: str
    """"stop" (end token, stop string or grammar), "length", "abort" or "error"."""
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    timings: dict[str, Any] = field(default_factory=dict)
    """Seconds: queue_s, ttft_s, prefill_s, decode_s, tpot_s, total_s; preemptions; miss_reason; speculation; seed."""
    tool_calls: list[Any] = field(default_factory=list)
    reasoning: str = ""
    stop: str | None = None
    """The stop string that ended the answer."""


@dataclass(frozen=True)
class TokenEvent:
    """One step's news of a request. The last event has a finish_reason and the completion."""

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    completion: Completion | None = None
    error: EdgeLLMError | None = None


class TextOutput:
    """Text of one answer. Holds back what may be the start of a stop string; what `take` gave is final."""

    def __init__(self, decoder: StreamDecoder, stop: tuple[str, ...]):
        self._decoder = decoder
        self._stop = tuple(s for s in stop if s)
        self.text = ""
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._starts: list[int] = []  # where each token's text begins
        self._sent_chars = self._sent_tokens = 0
        self.stopped = False
        self.stop: str | None = None
        """The stop string that was found."""

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Add a token; True when a stop string is complete (the text then ends before it)."""
        self._starts.append(len(self.text))
        self.ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        return self._add(self._decoder.push(token_id))

    def finish(self) -> None:
        """No more tokens: the rest of an unfinished character, then nothing is held back any more."""
        if not self.stopped:
            self._add(self._decoder.finish())
        self.stopped = True

    def take(self) -> tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Text, ids and logprobs that became final since the last call."""
        end = len(self.text) - (0 if self.stopped else self._held())
        n = self._sent_tokens
        while n < len(self.ids) and self._end_of(n) <= end and self._stays(n, end):
            n += 1
        text, ids = self.text[self._sent_chars : end], tuple(self.ids[self._sent_tokens : n])
        logprobs = tuple(self.logprobs[self._sent_tokens : n])
        self._sent_chars, self._sent_tokens = max(end, self._sent_chars), n
        return text, ids, logprobs

    def _stays(self, token: int, end: int) -> bool:
        """Whether no stop string can take the token away: one that has brought no text yet (the first bytes of a
        character) lies wholly behind a stop string that begins there."""
        return self.stopped or not self._stop or self._starts[token] < end

    def _end_of(self, token: int) -> int:
        return self._starts[token + 1] if token + 1 < len(self._starts) else len(self.text)

    def _add(self, piece: str) -> bool:
        if not piece:
            return False
        longest = max((len(s) for s in self._stop), default=0)
        begin = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [(at, s) for s in self._stop if (at := self.text.find(s, begin)) >= 0]
        if not found:
            return False
        end, self.stop = min(found)
        self._cut(end)
        return True

    def _cut(self, end: int) -> None:
        """End the text there; tokens wholly behind it go, one that straddles it keeps the bytes before it."""
        self.text, self.stopped = self.text[:end], True
        keep = sum(start < end for start in self._starts)
        del self.ids[keep:], self.logprobs[keep:], self._starts[keep:]
        if self.logprobs and keep:
            last, rest = self.logprobs[-1], len(self.text[self._starts[-1] :].encode())
            rest = max(0, rest - _num_unfinished(b"".join(p.bytes for p in self.logprobs[:-1])))
            self.logprobs[-1] = TokenLogprobs(last.id, last.token, last.bytes[:rest], last.logprob, last.top)

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        most = min(max((len(s) for s in self._stop), default=0) - 1, len(self.text))
        for n in range(most, 0, -1):
            if any(s.startswith(self.text[-n:]) for s in self._stop):
                return n
        return 0


def _num_unfinished(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])
