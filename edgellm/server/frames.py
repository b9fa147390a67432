"""How answers are cut into lines and events, and what every dialect's framer offers."""

from __future__ import annotations

import json
from typing import Any, Protocol

from edgellm.server.job import Delta

__all__ = ["DONE", "NDJSON", "SSE", "Framer", "dumps", "ndjson", "sse"]

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""Characters that some clients (httpx among them) take for the end of a line; JSON may hold them escaped."""


class Framer(Protocol):
    """Turns the deltas of one reply into the bytes of one dialect's stream."""

    media_type: str

    def open(self) -> list[bytes]:
        """What goes out before the first delta."""
        ...

    def push(self, delta: Delta) -> list[bytes]:
        """The frames of one delta."""
        ...

    def close(self) -> list[bytes]:
        """What goes out after the last delta."""
        ...

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The single object of a reply that is not streamed."""
        ...

    def fail(self, status: int, message: str) -> list[bytes]:
        """What ends a stream that broke after its first byte."""
        ...


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dumps(value: Any) -> str:
    """Compact JSON on one line, for every reader's notion of a line."""
    text = _encode(value)
    return text if text.isascii() else text.translate(_BREAKS)


def ndjson(value: Any) -> bytes:
    """One object per line."""
    return dumps(value).encode() + b"\n"


def sse(value: Any, event: str | None = None) -> bytes:
    """One server-sent event, with its name where the dialect has names."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {dumps(value)}\n\n".encode()
