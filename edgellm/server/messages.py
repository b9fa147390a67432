"""Messages and tools of every dialect in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from edgellm.errors import RequestError
from edgellm.server.body import Wire
from edgellm.server.job import new_id

__all__ = ["ChatMessage", "Tool", "arguments_object", "join_text", "no_images", "to_tools", "to_turns"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ROLES["function"] = "tool"


class Function(Wire):
    """The function of a tool call on the wire."""

    name: str = ""
    arguments: dict[str, Any] | str | None = None


class Call(Wire):
    """A tool call in an assistant turn that the client sends back."""

    id: str | None = None
    function: Function


class ChatMessage(Wire):
    """One turn, as Ollama's and OpenAI's clients send it."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    thinking: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class ToolFunction(Wire):
    """A function the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    """A tool as chat requests list it."""

    type: str = "function"
    function: ToolFunction


def no_images(model: str) -> RequestError:
    """The refusal of every picture: dropping it in silence would let the model make one up."""
    return RequestError(f"{model} has no image input; send text only")


def join_text(content: str | list[dict[str, Any]] | None, model: str, where: str) -> str:
    """The text of a content field. Several text parts are joined by one newline.

    Raises RequestError for images, audio, files and parts of unknown shape.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        kind = part.get("type", "text")
        if kind in ("image_url", "image", "input_image"):
            raise no_images(model)
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise RequestError(f"{where}: a content part of type {kind!r} is not supported (text is)")
        field = "refusal" if kind == "refusal" else "text"
        text = part.get(field)
        if not isinstance(text, str):
            raise RequestError(f"{where}: a content part of type {kind!r} needs a string in {field!r}")
        texts.append(text)
    return "\n".join(texts)


def arguments_object(value: dict[str, Any] | str | None, where: str) -> dict[str, Any]:
    """Tool-call arguments as an object, from an object or from JSON text."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}.arguments is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{where}.arguments must be a JSON object")
    return value


def to_turns(
    messages: Iterable[ChatMessage], model: str, *, strict_null: bool = False, places: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """`messages` as template turns. With `strict_null`, content may be null only beside tool calls (OpenAI's rule).
    `places`: where each stood in the request, if not in `messages`.

    Raises RequestError that names the first turn it cannot take.
    """
    turns: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        where = places[number] if places else f"messages.{number}"
        turns.append(_turn(message, where, model, names, strict_null))
    return turns


def _turn(message: ChatMessage, where: str, model: str, names: dict[str, str], strict_null: bool) -> dict[str, Any]:
    role = _ROLES.get(message.role.lower())
    if role is None:
        raise RequestError(f"{where}: role {message.role!r} is not one of {', '.join(sorted(_ROLES))}")
    if message.images:
        raise no_images(model)
    if strict_null and message.content is None and not message.tool_calls:
        raise RequestError(f"{where}: content may be null only beside tool_calls")
    turn: dict[str, Any] = {"role": role, "content": join_text(message.content, model, where)}
    thought = message.thinking or message.reasoning or message.reasoning_content
    if thought and role == "assistant":
        turn["reasoning_content"] = turn["thinking"] = thought
    if message.tool_calls:
        turn["tool_calls"] = [
            _call(call, f"{where}.tool_calls.{i}", names) for i, call in enumerate(message.tool_calls)
        ]
    if role == "tool":
        _name_tool_result(turn, message, names)
    return turn


def _call(call: Call, where: str, names: dict[str, str]) -> dict[str, Any]:
    if not call.function.name:
        raise RequestError(f"{where}.function.name is missing")
    call_id = call.id or new_id("call_", 8)
    names[call_id] = call.function.name
    arguments = arguments_object(call.function.arguments, f"{where}.function")
    return {"id": call_id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _name_tool_result(turn: dict[str, Any], message: ChatMessage, names: dict[str, str]) -> None:
    """Which function a tool turn answers: by its own name, or by looking its call id up in the turns before."""
    name = message.tool_name or message.name or names.get(message.tool_call_id or "")
    if name:
        turn["name"] = name
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id


def to_tools(tools: Iterable[Tool] | None) -> tuple[dict[str, Any], ...]:
    """Tools as templates read them. Raises RequestError for a kind other than function, or without a name."""
    found = []
    for number, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise RequestError(f"tools.{number}: type {tool.type!r} is not supported (function is)")
        if not tool.function.name:
            raise RequestError(f"tools.{number}.function.name is missing")
        function = {
            "name": tool.function.name,
            "description": tool.function.description or "",
            "parameters": tool.function.parameters or {"type": "object", "properties": {}},
        }
        found.append({"type": "function", "function": function})
    return tuple(found)
