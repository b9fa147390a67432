"""Ollama's `options` object: checked by name, turned into sampling fields and a context limit."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgellm.errors import RequestError

__all__ = ["Options", "parse_options"]

_log = logging.getLogger("edgellm.server")
_IGNORED = (
    "num_keep num_batch num_gpu main_gpu use_mmap num_thread draft_num_predict tfs_z penalize_newline numa low_vram "
    "f16_kv logits_all vocab_only use_mlock embedding_only"
)
"""Known to Ollama, without meaning here: the server is told them once, when it starts, or they are obsolete."""


@dataclass(frozen=True)
class Options:
    """What a request asks of the sampler. `sampling` holds `SamplingParams` fields; `num_ctx` None means the
    server's own limit."""

    sampling: dict[str, Any] = field(default_factory=dict)
    num_ctx: int | None = None


def parse_options(given: Mapping[str, Any] | None, source: str = "request") -> Options:
    """`given` in our terms. None values are unset; unknown names are logged and ignored.

    Raises RequestError that names the option when its value is of the wrong type or out of range.
    """
    sampling: dict[str, Any] = {}
    num_ctx = None
    for name, value in (given or {}).items():
        if value is None:
            continue
        if name == "num_ctx":
            num_ctx = _context(value)
        elif name in _FIELDS:
            field_name, convert = _FIELDS[name]
            sampling[field_name] = convert(name, value)
        else:
            known = name in _IGNORED.split()
            _log.log(logging.DEBUG if known else logging.WARNING, "%s option %r is ignored", source, name)
    if sampling.get("mirostat") == 1:
        _log.warning("mirostat 1 is not offered (2 is); ignored")
        sampling["mirostat"] = 0
    return Options(sampling, num_ctx)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f'option "{name}" must be of type integer, not {value!r}')
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f'option "{name}" must be finite')
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f'option "{name}" must be of type float, not {value!r}')
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f'option "{name}" must be finite')
    return number


def _bounded(low: float, high: float = math.inf) -> Callable[[str, Any], float]:
    def convert(name: str, value: Any) -> float:
        number = _number(name, value)
        if not low <= number <= high:
            limits = f"between {low:g} and {high:g}" if math.isfinite(high) else f"{low:g} or more"
            raise RequestError(f'option "{name}" must be {limits}, not {value!r}')
        return number

    return convert


def _positive(name: str, value: Any) -> float:
    number = _number(name, value)
    if number <= 0:
        raise RequestError(f'option "{name}" must be above 0, not {value!r}')
    return number


def _at_least(low: int) -> Callable[[str, Any], int]:
    def convert(name: str, value: Any) -> int:
        number = _whole(name, value)
        if number < low:
            raise RequestError(f'option "{name}" must be {low} or more, not {value!r}')
        return number

    return convert


def _seed(name: str, value: Any) -> int | None:
    number = _whole(name, value)
    return None if number < 0 else number


def _stop(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or any(not isinstance(text, str) for text in value):
        raise RequestError(f'option "{name}" must be of type array of strings, not {value!r}')
    return tuple(text for text in value if text)


def _mirostat(name: str, value: Any) -> int:
    number = _whole(name, value)
    if number not in (0, 1, 2):
        raise RequestError(f'option "{name}" must be 0, 1 or 2, not {value!r}')
    return number


def _context(value: Any) -> int | None:
    """num_ctx 0 means the server's own limit, as in Ollama."""
    number = _whole("num_ctx", value)
    if number < 0:
        raise RequestError(f'option "num_ctx" must be 1 or more (0: as the server says), not {value!r}')
    return number or None


_FIELDS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "num_predict": ("max_tokens", _at_least(-2)),
    "temperature": ("temperature", _bounded(0)),
    "top_k": ("top_k", _whole),
    "top_p": ("top_p", _bounded(0, 1)),
    "min_p": ("min_p", _bounded(0, 1)),
    "typical_p": ("typical_p", _bounded(0, 1)),
    "repeat_last_n": ("repeat_last_n", _at_least(-1)),
    "repeat_penalty": ("repeat_penalty", _positive),
    "presence_penalty": ("presence_penalty", _number),
    "frequency_penalty": ("frequency_penalty", _number),
    "mirostat": ("mirostat", _mirostat),
    "mirostat_tau": ("mirostat_tau", _number),
    "mirostat_eta": ("mirostat_eta", _number),
    "seed": ("seed", _seed),
    "stop": ("stop", _stop),
}
