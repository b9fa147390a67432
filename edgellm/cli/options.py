"""Flags that several commands share, gathered into one object per group before the command's own function runs."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click

__all__ = ["ModelFlags", "SamplingFlags", "Size", "Text", "json_option", "local_option"]
__all__ += ["model_options", "plain_model_options", "sampling_options"]

F = TypeVar("F", bound=Callable[..., Any])


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes: `800M`, `8G`, `1.5GiB`, `4096`. K, M, G, T are powers of 1024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes, or wrong usage."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
        if not match:
            self.fail(f"{value!r} is not a size such as 800M or 8G", param, ctx)
        return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


class Text(click.ParamType):  # type: ignore[type-arg]
    """Words for the model. Python keeps bytes that the locale cannot read as lone surrogates: put together again they
    are UTF-8, or wrong usage."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as typed."""
        data = str(value).encode("utf-8", "surrogateescape")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"it is not UTF-8 at byte {error.start}", param, ctx)


class Finite(click.FloatRange):
    """A number within bounds that is neither NaN nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or wrong usage."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


@dataclass(frozen=True)
class ModelFlags:
    """How a model is opened. None: the default of `edgellm.LLM`."""

    backend: str = "auto"
    threads: int | None = None
    ctx: int | None = None
    memory: int | None = None
    kv_type: str = "f16"
    draft: str | None = None
    draft_max: int | None = None
    prompt_cache: str | None = None
    swap_space: int | None = None
    partial: bool = False

    def given(self) -> dict[str, Any]:
        """The flags that differ from their defaults, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


@dataclass(frozen=True)
class SamplingFlags:
    """Sampling as given on the command line. None: as the stored model says, else the default of `SamplingParams`."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        """The values that were given, by `SamplingParams` name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


_PLAIN = [
    click.option("--backend", type=click.Choice(["auto", "cpu", "metal", "cuda", "reference"]), default="auto"),
    click.option("--threads", type=click.IntRange(1, 1024), help="Default: physical cores."),
    click.option("--ctx", type=click.IntRange(1, 1 << 30), help="Most tokens one conversation may hold."),
    click.option("--memory", type=Size(), help="Budget for weights, KV cache and scratch, such as 8G."),
    click.option("--kv-type", type=click.Choice(["f32", "f16", "q8_0"]), default="f16"),
]

_ENGINE = [
    click.option(
        "--draft",
        metavar="MODEL",
        help="A small model that guesses ahead, or `lookup`: guess from the prompt; the answer stays the same.",
    ),
    click.option("--draft-max", type=click.IntRange(1, 64), help="Most tokens guessed at once."),
    click.option("--prompt-cache", type=click.Path(dir_okay=False), help="Keep the computed prompt in this file."),
    click.option(
        "--partial", is_flag=True, help="Keep only the weights that fit in memory; read the others as needed."
    ),
    click.option("--swap-space", type=Size(), help="Disk for the KV cache of paused requests."),
]

_SAMPLING = [
    click.option("--temperature", type=Finite(0), help="0: always the likeliest token. Default 0.8."),
    click.option("--top-k", type=int, help="Default 40; 0: off."),
    click.option("--top-p", type=Finite(0, 1), help="Default 0.9; 1: off."),
    click.option("--min-p", type=Finite(0, 1), help="Default 0: off."),
    click.option("--seed", type=int, help="Default: a fresh one each time."),
    click.option("-n", "--max-tokens", type=click.IntRange(-2), help="Default -1: to the end token or the context."),
]


def _gather(flags: type[Any], options: list[Callable[[F], F]], argument: str) -> Callable[[F], F]:
    names = [f.name for f in fields(flags)]

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(**values: Any) -> Any:
            values[argument] = flags(**{name: values.pop(name) for name in names if name in values})
            return function(**values)

        for option in reversed(options):
            option(wrapper)
        return wrapper  # type: ignore[return-value]

    return decorate


def model_options(function: F) -> F:
    """Add the flags of `ModelFlags`; the command takes `model_flags`."""
    return _gather(ModelFlags, _PLAIN + _ENGINE, "model_flags")(function)


def plain_model_options(function: F) -> F:
    """As `model_options`, for commands that drive the model themselves: no drafts, prompt cache or swapping."""
    return _gather(ModelFlags, _PLAIN, "model_flags")(function)


def sampling_options(function: F) -> F:
    """Add the flags of `SamplingFlags`; the command takes `sampling`."""
    return _gather(SamplingFlags, _SAMPLING, "sampling")(function)


def json_option(function: F) -> F:
    """Add `--json`; the command takes `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(function)


def local_option(function: F) -> F:
    """Add `--local`; the command takes `local`."""
    return click.option("--local", is_flag=True, help="Do not use a running server; load the model here.")(function)


def stats_option(function: F) -> F:
    """Add `--stats`; the command takes `stats`."""
    text = "After each answer, a line on stderr: tokens, speed, and what guesses (--draft) gained."
    return click.option("--stats", is_flag=True, help=text)(function)
