"""Sixty JSON Schemas of varied kinds, with all strings and arrays bounded, so that every reply can end."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(most: int = 12, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def whole(low: int = 0, high: int = 100) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def items(inner: Schema, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": inner, "minItems": least, "maxItems": most}


def record(_optional: tuple[str, ...] = (), **fields: Schema) -> Schema:
    required = [name for name in fields if name not in _optional]
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


FLAG: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}
POINT = record(x=whole(-9, 9), y=whole(-9, 9))

SCALARS = [
    FLAG,
    NOTHING,
    whole(),
    whole(-1000, -10),
    whole(7, 7),
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9},
    {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "minimum": -2.5, "maximum": 2.5},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
    text(),
    text(5, minLength=5),
    text(3, minLength=1),
    {"const": "yes"},
    {"const": 42},
    {"const": {"a": [1, None]}},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, 2, 3, "many", None, True]},
    {"type": ["boolean", "null"]},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
]
PATTERNS = [
    {"type": "string", "pattern": "^[0-9]{4}$"},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
    {"type": "string", "pattern": "^(left|right)$"},
    {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
    {"type": "string", "pattern": "^\\+?[0-9 ]{3,12}$"},
    {"type": "string", "pattern": "^[a-z]+@[a-z]+\\.(org|net)$", "maxLength": 24},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
]
ARRAYS = [
    items(whole()),
    items(FLAG, 4, 2),
    items(text(6), 3, 1),
    items({"enum": ["a", "b"]}, 5),
    items(items(whole(0, 9), 2), 2, 1),
    items(POINT, 2, 1),
    {"type": "array", "prefixItems": [whole(), text(4), FLAG], "items": False, "minItems": 3},
    {"type": "array", "items": {"anyOf": [whole(), NOTHING]}, "minItems": 1, "maxItems": 4},
]
OBJECTS = [
    POINT,
    record(name=text(), age=whole()),
    record(("nick",), name=text(), nick=text(6)),
    record(name=text(), tags=items(text(8), 3), ok=FLAG),
    record(user=record(name=text(), home=record(city=text(), zip={"type": "string", "pattern": "^[0-9]{5}$"}))),
    record(a=record(b=record(c=record(d=record(e=whole()))))),
    record(kind={"const": "circle"}, radius={"type": "number", "minimum": 0, "maximum": 10}),
    record(answer={"enum": ["yes", "no", "perhaps"]}, why=text(20)),
    record(**{f"field_{n}": whole(0, 9) for n in range(10)}),
    record(**{"with space": FLAG, 'quote"d': whole(), "ünï": text(3)}),
    {"type": "object", "properties": {"a": FLAG}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "additionalProperties": False},
]
COMBINED = [
    {"anyOf": [whole(), text(5)]},
    {"anyOf": [record(kind={"const": "dog"}, barks=FLAG), record(kind={"const": "cat"}, lives=whole(1, 9))]},
    {"oneOf": [record(a=whole()), record(b=text(4))]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    {"$defs": {"point": POINT}, **record(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"})},
    {"definitions": {"id": {"type": "string", "pattern": "^[a-f]{3}$"}}, **items({"$ref": "#/definitions/id"}, 3, 1)},
    {"$defs": {"n": {"anyOf": [NOTHING, record(v=whole(0, 9), next=NOTHING)]}}, **record(list={"$ref": "#/$defs/n"})},
    record(value={"anyOf": [whole(), NOTHING, items(whole(0, 9), 2)]}),
    record(shape={"anyOf": [POINT, record(r=whole(1, 5))]}, color={"enum": ["red", "blue"]}),
    record(
        ("note",), id={"type": "string", "format": "uuid"}, when={"type": "string", "format": "date"}, note=text(10)
    ),
]
SCHEMAS = [*SCALARS, *PATTERNS, *ARRAYS, *OBJECTS, *COMBINED]
assert len(SCHEMAS) == 60
