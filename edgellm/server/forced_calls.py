"""`tool_choice` required or named: the reply is held to a JSON object that is one call, whatever the family's own way
of writing calls is, and read back as that call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edgellm.chat.tools import Parser, Piece
from edgellm.errors import RequestError

__all__ = ["ForcedCall", "calls_schema"]


def calls_schema(tools: Sequence[dict[str, Any]], choice: str) -> dict[str, Any]:
    """The schema of one call. `choice`: `required`, or `=NAME`. Raises RequestError for parameters of another type than
    object: every client reads arguments by their names."""
    functions = [tool["function"] for tool in tools]
    if choice.startswith("="):
        functions = [function for function in functions if function["name"] == choice[1:]]
    if len(functions) == 1:
        return _call(functions[0], "#")
    return {"anyOf": [_call(function, f"#/anyOf/{number}") for number, function in enumerate(functions)]}


def _call(function: dict[str, Any], root: str) -> dict[str, Any]:
    arguments = _moved(function["parameters"], f"{root}/properties/arguments")
    kind = arguments.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise RequestError(f"tools: the parameters of {function['name']!r} must be of type object, not {kind!r}")
    properties = {"name": {"const": function["name"]}, "arguments": {**arguments, "type": "object"}}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(value: Any, root: str) -> Any:
    """A schema whose references to its own root still hold where it stands now."""
    if isinstance(value, list):
        return [_moved(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(item, root) for key, item in value.items()}
    target = value.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = root + target[1:]
    return moved


class ForcedCall:
    """Reply parser: what `inner` (the family's own parser) takes for content is one call. A reply that was cut inside
    it is given as text; nothing is lost."""

    def __init__(self, inner: Parser):
        self._inner = inner
        self._text = ""
        self.cut = False

    def push(self, text: str) -> list[Piece]:
        """Thoughts at once; of the call nothing is known before its end."""
        return self._keep(self._inner.push(text))

    def finish(self) -> list[Piece]:
        """The call, or the text of one that is incomplete."""
        pieces = self._keep(self._inner.finish())
        try:
            call = json.loads(self._text)
            return [*pieces, Piece(calls=((call["name"], call["arguments"]),))]
        except (ValueError, KeyError, TypeError):
            self.cut = True
            return [*pieces, Piece(content=self._text)] if self._text else pieces

    def _keep(self, pieces: list[Piece]) -> list[Piece]:
        self._text += "".join(piece.content for piece in pieces)
        return [piece for piece in pieces if piece.thinking]
