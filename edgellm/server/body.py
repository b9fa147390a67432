"""Request bodies: read raw, bounded in size and time, parsed as JSON whatever the Content-Type says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from edgellm.errors import CancelledError, RequestError

__all__ = ["BodyTooLarge", "SlowBody", "UnsupportedEncoding", "Whole", "Wire", "body_parts", "parse", "read_json"]

_FORM = re.compile(r"str|int|float|bool|(list|dict)\[.*\]")
"""What pydantic calls the forms of a union in an error's place."""
_MAX_DEPTH = 256
"""Lists and objects within each other: far more than any request needs, far less than Python's recursion bears."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class BodyTooLarge(RequestError):
    """A body over the limit."""

    http_status = 413


class SlowBody(RequestError):
    """A client that announced a body and does not send it."""

    http_status = 408


class UnsupportedEncoding(RequestError):
    """A compressed body."""

    http_status = 415


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""An integer, which JSON may also write as 8.0: to JSON Schema, in which the vendors describe their APIs, it is one."""


class Wire(BaseModel):
    """Base of what clients send: unknown fields are ignored, values are not converted between types."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())


WireT = TypeVar("WireT", bound=Wire)


async def read_body(request: Request, limit: int, timeout: float) -> bytes:
    """The whole body. Raises BodyTooLarge, SlowBody, UnsupportedEncoding, CancelledError."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedEncoding(f"Content-Encoding {encoding!r} is not supported; send the body uncompressed")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise BodyTooLarge(f"the request body has {length} bytes, the limit is {limit}")
    parts: list[bytes] = []
    size = 0
    async for part in body_parts(request, timeout):
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"the request body is over the limit of {limit} bytes")
        parts.append(part)
    return b"".join(parts)


async def body_parts(request: Request, timeout: float) -> AsyncIterator[bytes]:
    """The body piece by piece. Raises SlowBody when none comes for `timeout` seconds, CancelledError when the client
    has left."""
    stream = request.stream().__aiter__()
    while True:
        try:
            yield await asyncio.wait_for(stream.__anext__(), timeout)
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            raise SlowBody(f"no more of the request body came for {timeout:g} s") from None
        except ClientDisconnect:
            raise CancelledError("the client went away") from None


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises RequestError in words for an empty, broken or non-object body."""
    settings = request.app.state.settings
    raw = await read_body(request, settings.max_body, settings.body_timeout)
    if not raw.strip():
        raise RequestError("missing request body")
    try:
        value = json.loads(raw, parse_constant=_no_constant)
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the request body is not JSON: {error}") from None
    if raw.count(b"[") + raw.count(b"{") > _MAX_DEPTH and _deeper(value, _MAX_DEPTH):
        raise RequestError(f"the request body is nested too deeply: over {_MAX_DEPTH} levels")
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, not {type(value).__name__}")
    # A lone surrogate has no UTF-8 form: as in Go, it becomes U+FFFD.
    return _mended(value) if b"\\ud" in raw.lower() else value


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects lie deeper than that (Python's own parser stops at 1,000 or 10,000, by version)."""
    layer = [value]
    for _ in range(levels):
        nested = [item.values() if isinstance(item, dict) else item for item in layer if isinstance(item, (dict, list))]
        layer = [item for items in nested for item in items]
    return any(isinstance(item, (dict, list)) for item in layer)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    return value


def parse(wire: type[WireT], value: dict[str, Any]) -> WireT:
    """`value` checked against `wire`. Raises RequestError that names the first bad field."""
    try:
        return wire.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        # Of a field that takes several forms, the one that the value fits furthest.
        first = max((one for one in found if one["loc"][:1] == found[0]["loc"][:1]), key=lambda one: len(one["loc"]))
        where = ".".join(str(step) for step in first["loc"] if not _FORM.fullmatch(str(step)))
        raise RequestError(f"{where}: {first['msg']}" if where else first["msg"]) from None
