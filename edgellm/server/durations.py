"""Go durations, keep_alive values and time stamps, as Ollama's clients write and read them."""

from __future__ import annotations

import functools
import math
import re
import time
from datetime import datetime, timedelta, timezone
from typing import Any

from edgellm.errors import RequestError

__all__ = ["FOREVER", "NS", "keep_alive_seconds", "local_stamp", "parse_duration", "utc_stamp"]

NS = 1_000_000_000
"""Nanoseconds per second: the unit of every duration on Ollama's wire."""
FOREVER = math.inf
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_FAR = timedelta(days=292 * 365)
"""Go's longest duration, about 292 years: what `expires_at` says for a model that stays loaded."""


def parse_duration(text: str) -> float:
    """Seconds of a Go duration such as `1h30m`, `-1m` or `300ms`. A unit may only be left out of zero.

    Raises ValueError with the text when it is no duration.
    """
    sign, body = (-1.0, text[1:]) if text[:1] == "-" else (1.0, text[1:] if text[:1] == "+" else text)
    if body == "0":
        return 0.0
    total, position = 0.0, 0
    while position < len(body):
        part = _PART.match(body, position)
        if part is None:
            raise ValueError(f"{text!r} is not a duration (write 300ms, 45s, 5m or 1h30m)")
        total += float(part[1]) * _UNITS[part[2]]
        position = part.end()
    if position == 0:
        raise ValueError("a duration can't be empty (write 300ms, 45s, 5m or 1h30m)")
    return sign * total


def keep_alive_seconds(value: Any, *, bare_numbers: bool = False) -> float | None:
    """Seconds a model stays loaded after its last request: None as the server says, infinity for ever.

    Numbers are seconds; strings are durations. Any negative value means for ever. "-1" is taken as the number;
    other bare numbers in a string only with `bare_numbers` (the environment variable's rule).
    """
    if value is None or value == "":
        return None
    if isinstance(value, str):
        text = value.strip()
        try:
            seconds = _number(text) if bare_numbers or text in ("-1", "0") else parse_duration(text)
        except ValueError as error:
            raise RequestError(f"keep_alive: {error}") from None
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(max(min(value, 1e18), -1e18))
    else:
        raise RequestError(f"keep_alive must be a number of seconds or a duration such as 5m, not {value!r}")
    if math.isnan(seconds):
        raise RequestError("keep_alive must be a number of seconds, not NaN")
    return FOREVER if seconds < 0 or seconds > _FAR.total_seconds() else seconds


def _number(text: str) -> float:
    try:
        return float(int(text))
    except ValueError:
        return parse_duration(text)


def utc_stamp(seconds: float | None = None) -> str:
    """RFC 3339 in UTC with microseconds and `Z`; now, or the given Unix time."""
    whole, micros = divmod(time.time_ns() // 1000 if seconds is None else int(seconds * 1_000_000), 1_000_000)
    return f"{_date(whole)}.{micros:06d}Z"


@functools.lru_cache(maxsize=8)
def _date(seconds: int) -> str:
    """The part of a stamp that changes once a second: stamps are written for every token."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def local_stamp(seconds: float) -> str:
    """RFC 3339 with the machine's own offset. Infinity becomes a date 292 years ahead."""
    if math.isinf(seconds):
        return (datetime.now(timezone.utc) + _FAR).astimezone().isoformat()
    return datetime.fromtimestamp(seconds, timezone.utc).astimezone().isoformat()
