"""Settings as frozen dataclasses. Each checks itself when made, so that a wrong value is named where it was given."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.errors import RequestError

__all__ = ["BLOCK_SIZE", "EngineConfig", "SamplingParams", "home"]

BLOCK_SIZE = 32
"""Tokens per KV block. Measured choice: long enough for contiguous reads per head, short enough to share prefixes."""
_LARGEST = 1e30
"""Sampling computes in float32: a number beyond this one, or a divisor below its inverse, could leave its range."""


def home() -> Path:
    """Folder that everything edgellm writes goes to (models, compiled kernels, history): EDGELLM_HOME, or the
    platform's cache folder. Raises RequestError where a user that is meant has no home."""
    given = os.environ.get("EDGELLM_HOME")
    if given:
        try:
            return Path(given).expanduser()
        except RuntimeError:
            raise RequestError(f"EDGELLM_HOME is {given!r}, but there is no such user") from None
    import platformdirs

    try:
        folder = Path(platformdirs.user_cache_dir("edgellm", appauthor=False))
    except RuntimeError:
        folder = Path("~")
    if not folder.is_absolute():
        raise RequestError("this user has no home folder: set EDGELLM_HOME to a folder for models and kernels")
    return folder


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy (ties: lowest id). `top_k` <= 0 and `top_p` >= 1 mean off.

    `seed` None draws a fresh one. `repeat_last_n`: 0 off, -1 the whole context. `max_tokens`: -1 to the end token or
    the context, -2 to the context whatever the model says. `grammar`: made per request, see `engine/sampler.py`.
    """

    max_tokens: int = -1
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    """Top logprobs to report per token (0: the chosen token only; None: none), of the raw logits."""
    grammar: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif self.stop is not None and not isinstance(self.stop, Iterable):
            raise RequestError(f"stop must be a list of strings, not {self.stop!r}")
        else:
            object.__setattr__(self, "stop", tuple(self.stop or ()))
        self._check_numbers()
        self._check_ranges()

    def _check_numbers(self) -> None:
        floats = "temperature top_p min_p typical_p repeat_penalty presence_penalty frequency_penalty"
        for name in (*floats.split(), "mirostat_tau", "mirostat_eta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise RequestError(f"{name} must be a finite number, not {value!r}")
            if abs(float(value)) > _LARGEST:
                raise RequestError(f"{name} must lie within {_LARGEST:g}, not {value}")
        for name in ("max_tokens", "top_k", "repeat_last_n", "mirostat"):
            _check_whole(name, getattr(self, name))
        for name in ("seed", "logprobs"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name))

    def _check_ranges(self) -> None:
        if self.temperature < 0:
            raise RequestError(f"temperature must be 0 or more, not {self.temperature}")
        for name in ("top_p", "min_p", "typical_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise RequestError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")
        if self.repeat_penalty < 1 / _LARGEST:
            raise RequestError(f"repeat_penalty must be above 0, not {self.repeat_penalty}")
        if self.max_tokens < -2:
            raise RequestError(f"max_tokens must be -2, -1, 0 or more, not {self.max_tokens}")
        if self.repeat_last_n < -1:
            raise RequestError(f"repeat_last_n must be -1, 0 or more, not {self.repeat_last_n}")
        if self.mirostat not in (0, 2):
            raise RequestError(f"mirostat must be 0 (off) or 2, not {self.mirostat}")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise RequestError(f"logprobs must lie between 0 and 20, not {self.logprobs}")
        if any(not isinstance(s, str) for s in self.stop):
            raise RequestError("stop must be a list of strings")
        if self.grammar is not None and not callable(self.grammar):
            raise RequestError(f"grammar must be a function that makes one, not {self.grammar!r}")
        self._check_bias()

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, (Mapping, type(None))):
            raise RequestError(f"logit_bias must be a dict of token ids and numbers, not {self.logit_bias!r}")
        for token_id, bias in (self.logit_bias or {}).items():
            _check_whole("a token id of logit_bias", token_id)
            if not isinstance(bias, numbers.Real) or not (bias == -math.inf or abs(bias) <= _LARGEST):
                raise RequestError(f"logit_bias of token {token_id} must be a number or -inf, not {bias!r}")


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name} must be a whole number, not {value!r}")


@dataclass(frozen=True)
class EngineConfig:
    """How one engine is set up. Sizes in bytes and tokens."""

    ctx: int
    """Most tokens one request may hold."""
    kv_type: str = "f16"
    memory: int | None = None
    """Budget for weights + KV + scratch; None: from the machine."""
    max_batch_tokens: int = 512
    """Tokens computed in one step at most; the scheduler lowers it from measured time."""
    max_seqs: int = 64
    max_waiting: int = 512
    block_size: int = BLOCK_SIZE
    swap_space: int = 0
    """Bytes of disk for KV blocks of preempted requests; 0: recompute them."""
    prefix_sharing: bool = True

    def __post_init__(self) -> None:
        least = {"ctx": 0, "memory": 0, "max_batch_tokens": 1, "max_seqs": 1, "max_waiting": 1, "swap_space": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if name == "memory" and value is None:
                continue
            _check_whole(name, value)
            if value < minimum:
                raise RequestError(f"{name} must be {minimum} or more, not {value}")
