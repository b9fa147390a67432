"""OpenAI's /v1/responses (stateless): the body as a job."""

from __future__ import annotations

import logging
from typing import Any

from edgellm.errors import RequestError
from edgellm.server.body import Whole, Wire, parse
from edgellm.server.job import Job
from edgellm.server.messages import ChatMessage, Tool, to_tools, to_turns
from edgellm.server.openai_wire import (
    Reasoning,
    allowed_tools,
    effort_to_think,
    open_sampling,
    response_format,
    tool_choice,
    top_count,
)

__all__ = ["ResponsesBody", "responses_job"]

_log = logging.getLogger("edgellm.server")
LOGPROBS = "message.output_text.logprobs"
"""What `include` holds where logprobs are wanted."""


class TextOptions(Wire):
    """`text`."""

    format: dict[str, Any] | None = None


class ResponsesBody(Wire):
    """POST /v1/responses."""

    model: str = ""
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: Whole | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    include: list[str] | None = None
    top_logprobs: Whole | None = None
    metadata: dict[str, Any] | None = None


def responses_job(body: ResponsesBody) -> Job:
    """A responses request as a job. Raises RequestError that names what is wrong."""
    if body.previous_response_id or body.conversation or body.background:
        raise RequestError(
            "previous_response_id, conversation and background need stored responses, and nothing is stored here: "
            "send the whole conversation as input"
        )
    messages, places = _messages(body)
    turns = to_turns(messages, body.model, places=places)
    if all(turn["role"] == "system" for turn in turns):
        raise RequestError("input: at least one item is needed")
    choice, tools = allowed_tools(body.tool_choice, to_tools(_tools(body.tools)))
    fields = open_sampling(body.temperature, body.top_p)
    if body.max_output_tokens is not None:
        if body.max_output_tokens < 1:
            raise RequestError(f"max_output_tokens must be 1 or more, not {body.max_output_tokens}")
        fields["max_tokens"] = body.max_output_tokens
    top = top_count(body.top_logprobs)
    if LOGPROBS in (body.include or ()):
        fields["logprobs"] = top
    return Job(
        model=body.model,
        messages=tuple(turns),
        tools=tools,
        tool_choice=tool_choice(choice, tools),
        think=effort_to_think(body.reasoning.effort if body.reasoning else None),
        think_if_able=True,
        format=response_format(body.text.format if body.text else None),
        sampling=fields,
    )


def _messages(body: ResponsesBody) -> tuple[list[ChatMessage], list[str]]:
    """The input items as chat messages, and where each stands in the request; a reasoning item goes to the assistant
    turn or call that follows it."""
    messages, places = [], []
    if body.instructions:
        messages.append(ChatMessage(role="system", content=body.instructions))
        places.append("instructions")
    if isinstance(body.input, str):
        if body.input:
            messages.append(ChatMessage(role="user", content=body.input))
            places.append("input")
        return messages, places
    thought: str | None = None
    for number, item in enumerate(body.input):
        kind = item.get("type") or "message"
        if kind == "reasoning":
            thought = _summary(item)
            continue
        message = _message(kind, item, f"input.{number}")
        if message is None:
            continue
        if message.role == "assistant":
            message.thinking, thought = thought, None
        previous = messages[-1] if messages else None
        if kind == "function_call" and previous is not None and previous.role == "assistant":
            previous.tool_calls = [*(previous.tool_calls or []), *(message.tool_calls or [])]
            previous.thinking = previous.thinking or message.thinking
        else:
            messages.append(message)
            places.append(f"input.{number}")
    return messages, places


def _message(kind: str, item: dict[str, Any], where: str) -> ChatMessage | None:
    """One input item; None for a record of a search that OpenAI's servers made."""
    if kind == "message":
        return _checked({"role": item.get("role"), "content": item.get("content")}, where)
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
        return _checked(call, where, ("tool_calls.0.id", "call_id"), ("tool_calls.0.function.", ""))
    if kind == "function_call_output":
        result = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        return _checked(result, where, ("content", "output"), ("tool_call_id", "call_id"))
    if kind == "web_search_call":
        return None
    if kind == "item_reference":
        raise RequestError(
            f"{where}: an item_reference needs stored responses, and nothing is stored here: send the item itself "
            "(clients do with store: false)"
        )
    raise RequestError(f"{where}: an item of type {kind!r} is not supported")


def _checked(value: dict[str, Any], where: str, *renamed: tuple[str, str]) -> ChatMessage:
    """`renamed`: beginnings of our fields, and what the client calls them."""
    try:
        return parse(ChatMessage, value)
    except RequestError as error:
        field, colon, problem = str(error).partition(": ")
        for ours, theirs in renamed:
            field = theirs + field.removeprefix(ours) if field.startswith(ours) else field
        raise RequestError(f"{where}.{field}{colon}{problem}") from None


def _summary(item: dict[str, Any]) -> str | None:
    parts = item.get("summary") or item.get("content") or []
    if not isinstance(parts, list):
        return None
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str)) or None


def _tools(given: list[dict[str, Any]] | None) -> list[Tool]:
    """Function tools, also from inside `namespace` groups. Other kinds run on OpenAI's servers or in its own clients:
    those are left out, with a log line, since some clients list them in every request."""
    tools = []
    for number, tool in enumerate(given or ()):
        if tool.get("type") == "namespace":
            inner = tool.get("tools")
            tools += _tools([part for part in inner if isinstance(part, dict)] if isinstance(inner, list) else [])
        elif tool.get("type", "function") == "function":
            function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
            try:
                tools.append(parse(Tool, {"type": "function", "function": function}))
            except RequestError as error:
                raise RequestError(f"tools.{number}.{error}") from None
        else:
            _log.warning("tools.%d of type %r is not offered to the model", number, tool.get("type"))
    return tools
