"""Ollama's request bodies, their translation into jobs, and answers as Ollama's objects."""

from __future__ import annotations

import logging
from typing import Any

from edgellm.errors import RequestError
from edgellm.server.body import Wire
from edgellm.server.durations import NS, keep_alive_seconds, utc_stamp
from edgellm.server.frames import NDJSON, dumps, ndjson
from edgellm.server.job import Delta, Finish, Job, OutputFormat, ToolCall, merged
from edgellm.server.messages import ChatMessage, Tool, no_images, to_tools, to_turns
from edgellm.server.options import Options, parse_options

__all__ = ["ChatBody", "CommonBody", "GenerateBody", "OllamaChunks", "chat_job", "done_object", "generate_job"]

_log = logging.getLogger("edgellm.server")
_THINK_LEVELS = ("low", "medium", "high", "max")


class CommonBody(Wire):
    """Fields that generate and chat share."""

    model: str = ""
    stream: bool | None = None
    format: Any = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None
    think: bool | str | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class GenerateBody(CommonBody):
    """POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[Any] | None = None


class ChatBody(CommonBody):
    """POST /api/chat."""

    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None


def output_format(value: Any) -> OutputFormat | None:
    """The `format` field: absent, null and "" are free text; "json"; or a JSON Schema object."""
    if value is None or value == "":
        return None
    if value == "json":
        return OutputFormat("json")
    if isinstance(value, dict):
        return OutputFormat("schema", value)
    raise RequestError(f'format must be "json" or a JSON Schema object, not {value!r}')


def _think(value: bool | str | None) -> bool | str | None:
    if isinstance(value, str) and value not in _THINK_LEVELS:
        raise RequestError(f'think must be true, false, "low", "medium", "high" or "max", not {value!r}')
    return value


def _sampling(body: CommonBody, options: Options) -> dict[str, Any]:
    """The options plus the logprobs fields that stand beside them."""
    if body.shift:
        _log.info("shift is ignored: an answer ends where the context does")
    sampling = dict(options.sampling)
    top = body.top_logprobs or 0
    if not 0 <= top <= 20:
        raise RequestError(f"top_logprobs must lie between 0 and 20, not {top}")
    if body.logprobs:
        sampling["logprobs"] = top
    return sampling


def chat_job(body: ChatBody) -> Job:
    """A chat request as a job. Raises RequestError that names what is wrong."""
    options = parse_options(body.options)
    return Job(
        model=body.model,
        messages=tuple(to_turns(body.messages or (), body.model)),
        tools=to_tools(body.tools),
        think=_think(body.think),
        format=output_format(body.format),
        sampling=_sampling(body, options),
        num_ctx=options.num_ctx,
        truncate=body.truncate is not False,
        keep_alive=keep_alive_seconds(body.keep_alive),
    )


def generate_job(body: GenerateBody) -> Job:
    """A generate request as a job: raw text, fill-in-the-middle, or one user turn through the template."""
    if body.images:
        raise no_images(body.model)
    if body.raw and (body.template or body.system or body.context):
        raise RequestError("raw mode does not support template, system, or context")
    options = parse_options(body.options)
    prompt = body.prompt or ""
    plain = bool(body.raw) or bool(body.suffix)
    return Job(
        model=body.model,
        messages=None if plain else ({"role": "user", "content": prompt},),
        prompt=prompt if plain else None,
        suffix=body.suffix or None,
        context=tuple(body.context or ()),
        template=body.template or None,
        system=body.system,
        think=_think(body.think),
        format=output_format(body.format),
        sampling=_sampling(body, options),
        num_ctx=options.num_ctx,
        keep_alive=keep_alive_seconds(body.keep_alive),
    )


def done_object(model: str, reason: str, chat: bool) -> dict[str, Any]:
    """The single object that answers a request to load or unload."""
    empty = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {"model": model, "created_at": utc_stamp(), **empty, "done": True, "done_reason": reason}


class OllamaChunks:
    """Turns deltas of one answer into /api/chat or /api/generate objects."""

    media_type = NDJSON

    def __init__(self, model: str, *, chat: bool, raw: bool = False):
        self.model = model
        self.chat = chat
        self.raw = raw
        self._head = f'{{"model":{dumps(model)},"created_at":'
        plain = '"message":{"role":"assistant","content":', '},"done":false}'
        self._plain = plain if chat else ('"response":', ',"done":false}')

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One object of the stream; the last one carries the metrics."""
        head: dict[str, Any] = {"model": self.model, "created_at": utc_stamp()}
        calls = [_call(call) for call in delta.tool_calls]
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": delta.content}
            if delta.thinking:
                message["thinking"] = delta.thinking
            if calls:
                message["tool_calls"] = calls
            head["message"] = message
        else:
            head["response"] = delta.content
            if delta.thinking:
                head["thinking"] = delta.thinking
            if calls:
                head["tool_calls"] = calls
        head["done"] = delta.finish is not None
        if delta.finish is not None:
            head.update(self._final(delta.finish))
        if delta.logprobs:
            head["logprobs"] = [logprob(entry) for entry in delta.logprobs]
        return head

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The single object of a request that does not stream."""
        return self.chunk(merged(deltas))

    def open(self) -> list[bytes]:
        """Nothing goes before the first object."""
        return []

    def push(self, delta: Delta) -> list[bytes]:
        """One line per delta."""
        if delta.finish is None and not (delta.thinking or delta.tool_calls or delta.logprobs):
            # What nearly every token is: only the time and the text differ.
            before, behind = self._plain
            line = f'{self._head}"{utc_stamp()}",{before}{dumps(delta.content)}{behind}\n'
            return [line.encode()]
        return [ndjson(self.chunk(delta))]

    def close(self) -> list[bytes]:
        """The object with `done` was the last one."""
        return []

    def fail(self, status: int, message: str) -> list[bytes]:
        """The line that ends a stream that broke: an error, and no `done`."""
        return [ndjson({"error": message})]

    def _final(self, finish: Finish) -> dict[str, Any]:
        """Metrics of the last object; what is zero is left out, as Go does."""
        final: dict[str, Any] = {"done_reason": finish.reason}
        if not self.chat and not self.raw:
            final["context"] = list(finish.ids)
        numbers = {
            "total_duration": int(finish.total_s * NS),
            "load_duration": int(finish.load_s * NS),
            "prompt_eval_count": finish.prompt_tokens,
            "prompt_eval_duration": int(finish.prefill_s * NS),
            "eval_count": finish.new_tokens,
            "eval_duration": int(finish.decode_s * NS),
        }
        final.update({name: number for name, number in numbers.items() if number})
        final["cached_tokens"] = finish.cached_tokens
        if finish.miss_reason:
            final["cache_miss"] = finish.miss_reason
        if finish.truncated is not None:
            final["truncated"] = {"messages": finish.truncated[0], "tokens": finish.truncated[1]}
        return final


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"index": call.index, "name": call.name, "arguments": call.arguments}
    return {"id": call.id, "function": function}


def logprob(entry: Any) -> dict[str, Any]:
    """A `TokenLogprobs` as Ollama's (and, but for the empty list, OpenAI's) object."""
    value = {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.bytes)}
    if entry.top:
        value["top_logprobs"] = [
            {"token": top.token, "logprob": top.logprob, "bytes": list(top.bytes)} for top in entry.top
        ]
    return value
