"""Answers of /v1/chat/completions and /v1/completions, whole and streamed."""

from __future__ import annotations

import time
from typing import Any

from edgellm.server.errors import error_body
from edgellm.server.frames import DONE, SSE, dumps, sse
from edgellm.server.job import Delta, Finish, ToolCall, merged, new_id
from edgellm.server.openai_wire import usage

__all__ = ["ChatFrames", "CompletionFrames", "token_logprobs"]

FINGERPRINT = "fp_edgellm"


class _Frames:
    """What both kinds of completion share: one id, one time, usage, the end."""

    media_type = SSE
    kind = ""
    prefix = ""

    def __init__(self, model: str, *, include_usage: bool = False, n_prompts: int = 1):
        self.model = model
        self.include_usage = include_usage
        self.n_prompts = n_prompts
        self.id = new_id(self.prefix)
        self.created = int(time.time())
        self.finishes: dict[int, Finish] = {}

    def head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object of the reply."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def open(self) -> list[bytes]:
        """Nothing goes before the first delta."""
        return []

    def close(self) -> list[bytes]:
        """The usage chunk where it was asked for, then the end mark."""
        if not self.include_usage:
            return [DONE]
        return [sse({**self.head(self.kind, []), "usage": self._usage()}), DONE]

    def fail(self, status: int, message: str) -> list[bytes]:
        """The event that ends a stream that broke."""
        return [sse(error_body("openai", status, message))]

    def _usage(self) -> dict[str, Any]:
        return usage([self.finishes[index] for index in sorted(self.finishes)], self.n_prompts)


class ChatFrames(_Frames):
    """Chat completions."""

    kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, model: str, *, include_usage: bool = False):
        super().__init__(model, include_usage=include_usage)
        self._begun: set[int] = set()
        self._called: set[int] = set()
        self._plain: dict[int, tuple[bytes, bytes]] = {}

    def push(self, delta: Delta) -> list[bytes]:
        """The role once per choice, then reasoning, content and calls apart, then the finish chunk."""
        if (
            delta.index in self._begun
            and delta.content
            and not (delta.finish or delta.thinking or delta.tool_calls or delta.logprobs)
        ):
            # What nearly every token is: only the text differs.
            before, behind = self._around(delta.index)
            return [before + dumps(delta.content).encode() + behind]
        frames = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            # Null, as OpenAI has it, where a call comes first: of an empty text clients make a part of its own.
            only_calls = bool(delta.tool_calls) and not (delta.content or delta.thinking)
            frames.append(self._chunk(delta.index, {"role": "assistant", "content": None if only_calls else ""}))
        pieces: list[dict[str, Any]] = []
        if delta.thinking:
            pieces.append({"reasoning": delta.thinking})
        if delta.content:
            pieces.append({"content": delta.content})
        for call in delta.tool_calls:
            self._called.add(delta.index)
            pieces.append({"tool_calls": [tool_call(call)]})
        if delta.logprobs and not pieces:
            pieces.append({"content": ""})
        for number, piece in enumerate(pieces):
            frames.append(self._chunk(delta.index, piece, logprobs=() if number else delta.logprobs))
        if delta.finish is not None:
            self.finishes[delta.index] = delta.finish
            frames.append(self._chunk(delta.index, {}, self._reason(delta.finish, delta.index in self._called)))
        return frames

    def _around(self, index: int) -> tuple[bytes, bytes]:
        """A content chunk's bytes before and behind its text."""
        if index not in self._plain:
            before, _, behind = self._chunk(index, {"content": ""}).partition(b'"content":""')
            self._plain[index] = (before + b'"content":', behind)
        return self._plain[index]

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The single object of a request that does not stream."""
        choices = []
        for index in sorted({delta.index for delta in deltas}):
            answer = merged([delta for delta in deltas if delta.index == index])
            assert answer.finish is not None
            self.finishes[index] = answer.finish
            message: dict[str, Any] = {"role": "assistant", "content": answer.content}
            if answer.thinking:
                message["reasoning"] = answer.thinking
            if answer.tool_calls:
                message["content"] = answer.content or None
                message["tool_calls"] = [tool_call(call) for call in answer.tool_calls]
            reason = self._reason(answer.finish, bool(answer.tool_calls))
            choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": reason}
            choice["logprobs"] = chat_logprobs(answer.logprobs)
            choices.append(choice)
        return {**self.head("chat.completion", choices), "usage": self._usage()}

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: tuple[Any, ...] = ()
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        if logprobs:
            choice["logprobs"] = chat_logprobs(logprobs)
        return sse(self.head(self.kind, [choice]))

    @staticmethod
    def _reason(finish: Finish, called: bool) -> str:
        return "tool_calls" if called and finish.reason == "stop" else finish.reason


class CompletionFrames(_Frames):
    """Text completions."""

    kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, model: str, *, include_usage: bool = False, n_prompts: int = 1):
        super().__init__(model, include_usage=include_usage, n_prompts=n_prompts)
        self._offsets: dict[int, int] = {}

    def push(self, delta: Delta) -> list[bytes]:
        """Text; the last piece carries the finish reason."""
        if delta.finish is not None:
            self.finishes[delta.index] = delta.finish
        elif not delta.content and not delta.logprobs:
            return []
        return [sse(self.head(self.kind, [self._choice(delta)]))]

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The single object of a request that does not stream."""
        choices = []
        for index in sorted({delta.index for delta in deltas}):
            answer = merged([delta for delta in deltas if delta.index == index])
            assert answer.finish is not None
            self.finishes[index] = answer.finish
            choices.append(self._choice(answer))
        return {**self.head(self.kind, choices), "usage": self._usage()}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        reason = delta.finish.reason if delta.finish is not None else None
        offset = self._offsets.get(delta.index, 0)
        self._offsets[delta.index] = offset + len(delta.content)
        logprobs = completion_logprobs(delta.logprobs, offset)
        return {"text": delta.content, "index": delta.index, "logprobs": logprobs, "finish_reason": reason}


def tool_call(call: ToolCall) -> dict[str, Any]:
    """A call as OpenAI's object: the arguments are JSON text."""
    function = {"name": call.name, "arguments": dumps(call.arguments)}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def chat_logprobs(entries: tuple[Any, ...]) -> dict[str, Any] | None:
    """Logprobs of a chat choice; None where none were asked for."""
    return {"content": token_logprobs(entries), "refusal": None} if entries else None


def token_logprobs(entries: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Each token's logprob and its alternatives, as OpenAI's objects."""
    content = []
    for entry in entries:
        top = [{"token": t.token, "logprob": t.logprob, "bytes": list(t.bytes)} for t in entry.top or ()]
        value = {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.bytes), "top_logprobs": top}
        content.append(value)
    return content


def completion_logprobs(entries: tuple[Any, ...], offset: int) -> dict[str, Any] | None:
    """Logprobs of a text completion: parallel lists. `offset`: characters of text before these tokens."""
    if not entries:
        return None
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{top.token: top.logprob for top in entry.top or ()} for entry in entries],
        "text_offset": offsets,
    }
