"""Objects of a JSON Schema closed to names that it does not list.

JSON Schema lets an object have further entries unless `additionalProperties` is false, and schemas that people send
(those of pydantic, for one) leave that word out. A model writes further entries when it may, one behind the other, so
objects that list `properties` are closed, as they are in llama.cpp. What a closed schema admits the schema admits too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["closed_schema"]

_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Words whose value holds schemas by name."""
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "dependentRequired", "propertyNames")
"""Words that speak of further entries themselves."""


def closed_schema(schema: Any) -> Any:
    """`schema` with `additionalProperties: false` in each object that lists its properties. Unchanged where schemas are
    laid over one another (`allOf`, or words that combine beside `properties`): each may list a part of the names."""
    return schema if any(_is_laid_over(part) for part in _parts(schema)) else _closed(schema)


def _is_laid_over(schema: Mapping[str, Any]) -> bool:
    both = schema.get("allOf")
    layers = len(both) if isinstance(both, list) else 0
    layers += sum(word in schema for word in ("properties", "$ref", "anyOf", "oneOf", "if", "dependentSchemas"))
    return layers > 1


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """`schema` and all schemas in it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for word, value in schema.items():
        if word in _OF_NAMES and isinstance(value, Mapping):
            inner = list(value.values())
        elif word in _OF_LISTS and isinstance(value, list):
            inner = value
        else:
            inner = [value] if word in _OF_ONE else []
        for part in inner:
            yield from _parts(part)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for word, value in schema.items():
        if word in _OF_NAMES and isinstance(value, Mapping):
            closed[word] = {name: _closed(part) for name, part in value.items()}
        elif word in _OF_LISTS and isinstance(value, list):
            closed[word] = [_closed(part) for part in value]
        elif word in _OF_ONE:
            closed[word] = _closed(value)
    if _lists_all_names(schema):
        closed["additionalProperties"] = False
    return closed


def _lists_all_names(schema: Mapping[str, Any]) -> bool:
    names, required, fewest = (schema.get(word) for word in ("properties", "required", "minProperties"))
    if not isinstance(names, Mapping) or any(word in schema for word in _OPEN):
        return False
    if isinstance(required, list) and any(name not in names for name in required if isinstance(name, str)):
        return False
    return not isinstance(fewest, (int, float)) or fewest <= len(names)
