"""Anthropic's /v1/messages: the body as a job, and answers whole and streamed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from edgellm.errors import RequestError
from edgellm.server.body import Whole, Wire
from edgellm.server.durations import utc_stamp
from edgellm.server.errors import error_body
from edgellm.server.frames import SSE, dumps, sse
from edgellm.server.job import Delta, Finish, Job, OutputFormat, ToolCall, merged, new_id
from edgellm.server.messages import join_text, no_images
from edgellm.server.openai_wire import effort_to_think, open_sampling, stop_texts, tool_choice

__all__ = ["CountBody", "MessageFrames", "MessagesBody", "messages_job", "model_info", "model_list"]

_log = logging.getLogger("edgellm.server")


class InputMessage(Wire):
    """One turn."""

    role: str
    content: str | list[dict[str, Any]]


class AnthropicTool(Wire):
    """A tool of the request."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class Thinking(Wire):
    """`thinking`: enabled, adaptive or disabled."""

    type: str


class OutputConfig(Wire):
    """`output_config`."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesBody(Wire):
    """POST /v1/messages."""

    model: str
    max_tokens: Whole
    messages: list[InputMessage]
    system: str | list[dict[str, Any]] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class CountBody(MessagesBody):
    """POST /v1/messages/count_tokens: a request without a limit, since nothing is answered."""

    max_tokens: Whole = 1


def messages_job(body: MessagesBody) -> Job:
    """A messages request as a job. Raises RequestError that names what is wrong."""
    if not body.model:
        raise RequestError("model is required")
    if body.max_tokens < 1:
        raise RequestError(f"max_tokens must be above 0, not {body.max_tokens}")
    if not body.messages:
        raise RequestError("messages: at least one message is needed")
    turns: list[dict[str, Any]] = []
    if body.system:
        turns.append({"role": "system", "content": join_text(body.system, body.model, "system")})
    names: dict[str, str] = {}
    for number, message in enumerate(body.messages):
        turns.extend(_turns(message, f"messages.{number}", body.model, names))
    tools = tuple(_tool(tool) for tool in body.tools or () if _is_ours(tool))
    config = body.output_config
    return Job(
        model=body.model,
        messages=tuple(turns),
        tools=tools,
        tool_choice=_tool_choice(body.tool_choice, tools),
        think=_think(body),
        think_if_able=True,
        format=_format(config.format) if config else None,
        sampling=_sampling(body),
    )


def _sampling(body: MessagesBody) -> dict[str, Any]:
    fields = {"max_tokens": body.max_tokens, **open_sampling(body.temperature, body.top_p)}
    if body.top_k is not None:
        fields["top_k"] = body.top_k
    if body.stop_sequences:
        fields["stop"] = stop_texts(body.stop_sequences)
    return fields


def _think(body: MessagesBody) -> bool | str | None:
    """Off unless asked for: unlike Ollama's clients, Anthropic's do not expect thought they did not ask for."""
    if body.thinking is None or body.thinking.type == "disabled":
        return False
    effort = body.output_config.effort if body.output_config else None
    return effort_to_think(effort) or True


def _format(value: dict[str, Any] | None) -> OutputFormat | None:
    if value is None:
        return None
    if value.get("type") != "json_schema" or not isinstance(value.get("schema"), dict):
        raise RequestError("output_config.format must be {type: json_schema, schema: {...}}")
    return OutputFormat("schema", value["schema"])


def _is_ours(tool: AnthropicTool) -> bool:
    """Whether the client runs it by its schema. Tools that Anthropic's servers run are left out, with a log line, since
    some clients list them in every request."""
    if tool.type in (None, "custom"):
        return True
    _log.warning("tool %r of type %r is not offered to the model", tool.name, tool.type)
    return False


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    if not tool.name:
        raise RequestError("tools: a tool without a name")
    parameters = tool.input_schema or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_choice(value: dict[str, Any] | None, tools: tuple[dict[str, Any], ...]) -> str:
    kind = (value or {}).get("type", "auto")
    if kind not in ("auto", "any", "none", "tool"):
        raise RequestError(f"tool_choice.type must be auto, any, tool or none, not {kind!r}")
    return tool_choice(value if kind == "tool" else "required" if kind == "any" else kind, tools)


def _turns(message: InputMessage, where: str, model: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """The turns of one message: tool results come first, each as a turn of its own."""
    if message.role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}: role must be user or assistant, not {message.role!r}")
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    turn: dict[str, Any] = {"role": message.role}
    for number, block in enumerate(message.content):
        _block(block, f"{where}.content.{number}", model, names, turn, texts, results)
    turn["content"] = join_text(texts, model, where)
    only_results = bool(results) and not turn["content"] and "tool_calls" not in turn
    return results if only_results else [*results, turn]


def _block(
    block: dict[str, Any],
    where: str,
    model: str,
    names: dict[str, str],
    turn: dict[str, Any],
    texts: list[dict[str, Any]],
    results: list[dict[str, Any]],
) -> None:
    """Sorts one content block into the turn, its texts, or the tool results before it."""
    kind = block.get("type")
    if kind == "text":
        texts.append(block)
    elif kind == "thinking":
        turn["reasoning_content"] = turn["thinking"] = str(block.get("thinking") or "")
    elif kind == "redacted_thinking":
        return
    elif kind == "tool_use":
        name, arguments = block.get("name"), block.get("input")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise RequestError(f"{where}: tool_use needs a name and an input object")
        call_id = str(block.get("id") or new_id("toolu_"))
        names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        turn.setdefault("tool_calls", []).append(call)
    elif kind == "tool_result":
        results.append(_result(block, where, model, names))
    elif kind == "document":
        texts.append(_document(block, where))
    elif kind == "image":
        raise no_images(model)
    else:
        raise RequestError(f"{where}: a content block of type {kind!r} is not supported")


def _document(block: dict[str, Any], where: str) -> dict[str, Any]:
    """A document of plain text as a text block, under its title where it has one."""
    source = block.get("source")
    text = source.get("data") if isinstance(source, dict) and source.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError(f"{where}: of documents only plain text is read (source.type text)")
    title = block.get("title")
    return {"type": "text", "text": f"{title}\n{text}" if isinstance(title, str) and title else text}


def _result(block: dict[str, Any], where: str, model: str, names: dict[str, str]) -> dict[str, Any]:
    content = block.get("content")
    if content is not None and not isinstance(content, (str, list)):
        raise RequestError(f"{where}.content must be text or a list of blocks")
    if isinstance(content, list) and any(not isinstance(part, dict) for part in content):
        raise RequestError(f"{where}.content: every block must be an object")
    call_id = str(block.get("tool_use_id") or "")
    turn = {"role": "tool", "content": join_text(content, model, where), "tool_call_id": call_id}
    if call_id in names:
        turn["name"] = names[call_id]
    return turn


class MessageFrames:
    """Anthropic's message object and its events."""

    media_type = SSE

    def __init__(self, model: str, stops: Sequence[str] = ()):
        self.model = model
        self.stops = stops
        """The request's own stop strings: only these are told apart from the end of a turn."""
        self.id = new_id("msg_")
        self._block = -1
        self._kind = ""
        self._called = False
        self._started = False

    def open(self) -> list[bytes]:
        """Nothing before the first delta: its token counts go into message_start."""
        return []

    def push(self, delta: Delta) -> list[bytes]:
        """Blocks are opened and closed as the kind of text changes."""
        frames = [] if self._started else [self._start(delta.prompt_tokens)]
        if delta.thinking:
            frames += self._text("thinking", "thinking_delta", delta.thinking)
        if delta.content:
            frames += self._text("text", "text_delta", delta.content)
        for call in delta.tool_calls:
            frames += self._call(call)
        if delta.finish is not None:
            frames += self._end_block()
            stop = self._stop(delta.finish, self._called)
            frames.append(_event("message_delta", delta=stop, usage=message_usage(delta.finish)))
        return frames

    def close(self) -> list[bytes]:
        """The last event."""
        return [_event("message_stop")]

    def fail(self, status: int, message: str) -> list[bytes]:
        """The event that ends a stream that broke."""
        return [sse(error_body("anthropic", status, message), "error")]

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The single object of a request that does not stream."""
        answer = merged(deltas)
        assert answer.finish is not None
        content: list[dict[str, Any]] = []
        if answer.thinking:
            content.append({"type": "thinking", "thinking": answer.thinking, "signature": ""})
        if answer.content:
            content.append({"type": "text", "text": answer.content})
        content += [tool_use(call, call.arguments) for call in answer.tool_calls]
        return {
            **self._head(content),
            **self._stop(answer.finish, bool(answer.tool_calls)),
            "usage": message_usage(answer.finish),
        }

    def _stop(self, finish: Finish, called: bool) -> dict[str, Any]:
        """How the answer ended."""
        if finish.stop in self.stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop}
        return {"stop_reason": stop_reason(finish, called), "stop_sequence": None}

    def _head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None}

    def _start(self, prompt_tokens: int) -> bytes:
        self._started = True
        message = {**self._head([]), "usage": {"input_tokens": prompt_tokens, "output_tokens": 0}}
        return _event("message_start", message=message)

    def _text(self, kind: str, delta_kind: str, text: str) -> list[bytes]:
        frames = []
        if self._kind != kind:
            empty = {"type": kind, kind: ""}
            frames = self._begin_block(kind, {**empty, "signature": ""} if kind == "thinking" else empty)
        delta = {"type": delta_kind, kind: text}
        return [*frames, _event("content_block_delta", index=self._block, delta=delta)]

    def _call(self, call: ToolCall) -> list[bytes]:
        self._called = True
        delta = {"type": "input_json_delta", "partial_json": dumps(call.arguments)}
        return [
            *self._begin_block("tool_use", tool_use(call, {})),
            _event("content_block_delta", index=self._block, delta=delta),
        ]

    def _begin_block(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        frames = self._end_block()
        self._block += 1
        self._kind = kind
        return [*frames, _event("content_block_start", index=self._block, content_block=block)]

    def _end_block(self) -> list[bytes]:
        if not self._kind:
            return []
        self._kind = ""
        return [_event("content_block_stop", index=self._block)]


def tool_use(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as Anthropic's content block."""
    return {"type": "tool_use", "id": f"toolu_{call.id}", "name": call.name, "input": arguments}


def stop_reason(finish: Finish, called: bool) -> str:
    """Anthropic's word for how the answer ended."""
    if finish.reason == "length":
        return "max_tokens"
    return "tool_use" if called else "end_turn"


def message_usage(finish: Finish) -> dict[str, Any]:
    """Token counts; the input counts whole, cached tokens included."""
    usage: dict[str, Any] = {"input_tokens": finish.prompt_tokens, "output_tokens": finish.new_tokens}
    usage["cached_tokens"] = finish.cached_tokens
    if finish.miss_reason:
        usage["cache_miss"] = finish.miss_reason
    return usage


def model_info(name: str, modified: float) -> dict[str, Any]:
    """A model as Anthropic lists it."""
    return {"type": "model", "id": name, "display_name": name, "created_at": utc_stamp(modified)}


def model_list(models: list[dict[str, Any]]) -> dict[str, Any]:
    """The only page of the list."""
    first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    return {"data": models, "has_more": False, "first_id": first, "last_id": last}


def _event(name: str, **fields: Any) -> bytes:
    return sse({"type": name, **fields}, name)
