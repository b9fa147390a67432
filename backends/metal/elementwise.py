"""Chains of elementwise ops. On a GPU each chain is one kernel made by `mx.compile`, which serves any shape; compiling
for a CPU needs a C++ compiler on the user's machine, so there the same functions run as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

__all__ = ["Elementwise"]

Function = Callable[..., mx.array]


def _gelu(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.erf(x * 0.7071067811865476))


def _gelu_tanh(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": lambda x: x * mx.sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: mx.maximum(x, 0),
    "relu2": lambda x: mx.square(mx.maximum(x, 0)),
    "sigmoid": mx.sigmoid,
    "tanh": mx.tanh,
    "exp_rest": lambda x: mx.expm1(mx.minimum(x, 0)) - mx.minimum(x, 0),
}


def _gated(function: Callable[[mx.array], mx.array], gate: mx.array, up: mx.array) -> mx.array:
    return function(gate) * up


def _swiglu_oai(gate: mx.array, up: mx.array) -> mx.array:
    g = mx.minimum(gate, 7.0)
    return g * mx.sigmoid(1.702 * g) * (mx.clip(up, -7.0, 7.0) + 1.0)


def _softcapped(x: mx.array, factor: mx.array, cap: mx.array) -> mx.array:
    return cap * mx.tanh(x * factor / cap)


def _rotated(a: mx.array, b: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:
    return a * cos - b * sin, a * sin + b * cos


class Elementwise:
    """`activate[kind](gate)`, `gated[kind](gate, up)`, `softcapped(x, factor, cap)`, `rotated(a, b, cos, sin)`."""

    def __init__(self, compiled: bool):
        def wrap(function: Function) -> Function:
            return mx.compile(function, shapeless=True) if compiled else function

        self.activate: dict[str, Function] = {kind: wrap(f) for kind, f in _ACTIVATIONS.items()}
        self.gated: dict[str, Function] = {kind: wrap(partial(_gated, f)) for kind, f in _ACTIVATIONS.items()}
        self.gated["swiglu_oai"] = wrap(_swiglu_oai)
        self.softcapped = wrap(_softcapped)
        self.rotated: Callable[..., tuple[mx.array, mx.array]] = wrap(_rotated)
