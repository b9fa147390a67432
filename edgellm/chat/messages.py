"""Messages as clients send them, brought to the one shape templates expect (that of transformers)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from edgellm.errors import RequestError

__all__ = ["Arguments", "normalise", "text_of"]

PART_JOINER = "\n"
"""What stands between several text parts of one message."""


class Arguments(dict[str, Any]):
    """Arguments of a tool call; printed as JSON by templates that print them bare."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


def normalise(messages: Iterable[Mapping[str, Any]], keep_null: bool, short_ids: bool) -> list[dict[str, Any]]:
    """Copies with: content a text (parts joined by a newline; None only if `keep_null` and there are tool calls);
    tool-call arguments as objects, ids on both sides; reasoning under both names in use.

    `short_ids`: the template wants ids of nine letters or digits (Mistral). Raises RequestError for what is no message.
    """
    result: list[dict[str, Any]] = []
    open_calls: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}] must be an object with a role")
        out = dict(message)
        calls = [_call(call, i, n) for n, call in enumerate(message.get("tool_calls") or ())]
        content = message.get("content")
        if content is not None:
            out["content"] = text_of(content, i)
        elif not (keep_null and calls):
            out["content"] = ""
        if calls:
            out["tool_calls"] = calls
            open_calls = list(calls)
        else:
            out.pop("tool_calls", None)
        thought = next((message[k] for k in ("reasoning_content", "reasoning", "thinking") if message.get(k)), None)
        if thought is not None:
            out["reasoning_content"] = out["thinking"] = thought
        if message["role"] == "tool":
            _link(out, open_calls)
        result.append(out)
    if short_ids:
        _shorten(result)
    return result


def text_of(content: Any, index: int) -> str:
    """The text of a content that is a string or a list of parts. Raises RequestError for parts that are no text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"messages[{index}].content must be a text or a list of parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and kind in ("text", "input_text", "output_text") and "text" in part:
            texts.append(str(part["text"]))
        elif kind is not None and kind not in ("text", "input_text", "output_text"):
            raise RequestError(f"messages[{index}] holds a part of type {kind!r}, but this model takes only text")
        else:
            raise RequestError(f"messages[{index}].content holds a part that is no text part")
    return PART_JOINER.join(texts)


def _call(call: Any, index: int, n: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"messages[{index}].tool_calls[{n}] must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"messages[{index}].tool_calls[{n}].function.arguments is no JSON: {error}") from error
    if isinstance(arguments, Mapping):
        arguments = Arguments(arguments)
    return {
        "id": call.get("id") or f"call{index:03d}{n:02d}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _link(message: dict[str, Any], open_calls: list[dict[str, Any]]) -> None:
    """Gives a tool result the name and id of the call it answers: found by id, by name, or in order."""
    name = message.get("name") or message.get("tool_name")
    given_id = message.get("tool_call_id")
    for n, call in enumerate(open_calls):
        if call["id"] == given_id if given_id else name in (None, call["function"]["name"]):
            given_id, name = call["id"], name or call["function"]["name"]
            del open_calls[n]
            break
    if given_id:
        message["tool_call_id"] = given_id
    if name:
        message["name"] = message["tool_name"] = name


def _shorten(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        for holder, key in ((message, "tool_call_id"), *((call, "id") for call in message.get("tool_calls", ()))):
            given = holder.get(key)
            if isinstance(given, str) and not (len(given) == 9 and given.isalnum() and given.isascii()):
                holder[key] = hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]
