"""Norms, activations and other ops that read each number once: float32 rows, eight lanes at a time.

Rows are independent units, so a row's bits depend on nothing but the row. Sums over a row keep eight partial sums by
index mod 8 and add them in `sum_f32x8`'s order; the rest of a row that is no multiple of 8 is filled up with zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.backends.cpu.arena import Buf
from edgellm.backends.cpu.jit import Kernel, inline, kernel
from edgellm.backends.cpu.rows import pieces
from edgellm.backends.cpu.simd import (
    Vector,
    add,
    float_of_bits,
    float_of_int,
    fma,
    load_f32,
    load_f32x8,
    load_i32,
    maximum,
    minimum,
    mul,
    splat_f32x8,
    sqrt,
    store,
    store_f32,
    sub,
    sum_f32x8,
)
from edgellm.backends.cpu.tape import Tape
from edgellm.backends.cpu.vecmath import ONE, ZERO, arg, exp8, gelu8, load_part, sigmoid8, store_part, tanh8

__all__ = [
    "record_activate",
    "record_add",
    "record_columns",
    "record_concat",
    "record_norm",
    "record_scale",
    "record_take",
]

PIECE = 1024
"""Elements of one unit of an op that has no rows."""
SPARE = 64
"""Bytes of scratch for the ends of rows."""


def _norm(centre: bool, weighted: bool, biased: bool) -> Kernel:
    """y = (x - c) / sqrt(mean((x - c)^2) + eps) * w + b, c the mean (layer norm) or 0 (RMS norm).

    args: x, out, d, eps, w, b, n_groups: row i uses row i mod n_groups of w and b.
    """

    def norm(args: int, begin: int, end: int, scratch: int) -> None:
        d, eps, groups = arg(args, 2), float_of_bits(arg(args, 3)), arg(args, 6)
        whole, rest = d // 8 * 8, d % 8
        inverse = ONE / float_of_int(d)
        for row in range(begin, end):
            x, out = arg(args, 0) + 4 * d * row, arg(args, 1) + 4 * d * row
            at = 4 * d * (row % groups)
            mean = ZERO
            if centre:
                total = splat_f32x8(ZERO)
                for i in range(0, whole, 8):
                    total = add(total, load_f32x8(x + 4 * i))
                if rest != 0:
                    total = add(total, load_part(x + 4 * whole, rest, scratch))
                mean = sum_f32x8(total) * inverse
            shift = splat_f32x8(mean)
            squares = splat_f32x8(ZERO)
            for i in range(0, whole, 8):
                v = sub(load_f32x8(x + 4 * i), shift)
                squares = fma(v, v, squares)
            total_squares = sum_f32x8(squares)
            for i in range(whole, d):
                v1 = load_f32(x + 4 * i) - mean
                total_squares = total_squares + v1 * v1
            factor = ONE / sqrt(total_squares * inverse + eps)
            factors = splat_f32x8(factor)
            for i in range(0, whole, 8):
                y = mul(sub(load_f32x8(x + 4 * i), shift), factors)
                if weighted:
                    y = mul(y, load_f32x8(arg(args, 4) + at + 4 * i))
                if biased:
                    y = add(y, load_f32x8(arg(args, 5) + at + 4 * i))
                store(out + 4 * i, y)
            for i in range(whole, d):
                y1 = (load_f32(x + 4 * i) - mean) * factor
                if weighted:
                    y1 = y1 * load_f32(arg(args, 4) + at + 4 * i)
                if biased:
                    y1 = y1 + load_f32(arg(args, 5) + at + 4 * i)
                store_f32(out + 4 * i, y1)

    return kernel(norm, f"norm_{int(centre)}{int(weighted)}{int(biased)}")


NORMS = {
    (centre, weighted, biased): _norm(centre, weighted, biased)
    for centre in (False, True)
    for weighted in (False, True)
    for biased in (False, True)
}


def record_norm(tape: Tape, x: Buf, weight: Any, bias: Any, eps: float, centre: bool) -> Buf:
    """RMS norm (`centre` False) or layer norm over the last axis. `weight`, `bias`: float32 arrays or None."""
    d = x.shape[-1]
    groups = 1 if weight is None else weight.size // d
    out = tape.new(*x.shape)
    args = (x, out, d, np.float32(eps), 0 if weight is None else weight, 0 if bias is None else bias, groups)
    item = NORMS[centre, weight is not None, bias is not None]
    tape.op(item, x.size // d, args, reads=[x], writes=[out], step=0, scratch=SPARE, grain=(x, d))
    return out


# Activations: f(gate), f(gate) * up.
SQRT_2_PI, CUBIC = np.float32(0.7978845608028654), np.float32(0.044715)
LIMIT, ALPHA = np.float32(7), np.float32(1.702)


@inline
def _silu(x: Vector, up: Vector) -> Vector:
    return mul(mul(x, sigmoid8(x)), up)


@inline
def _gelu(x: Vector, up: Vector) -> Vector:
    return mul(gelu8(x), up)


@inline
def _gelu_tanh(x: Vector, up: Vector) -> Vector:
    inner = mul(splat_f32x8(SQRT_2_PI), fma(mul(splat_f32x8(CUBIC), mul(x, x)), x, x))
    half = mul(x, splat_f32x8(np.float32(0.5)))
    return mul(fma(half, tanh8(inner), half), up)


@inline
def _relu(x: Vector, up: Vector) -> Vector:
    return mul(maximum(x, splat_f32x8(ZERO)), up)


@inline
def _relu2(x: Vector, up: Vector) -> Vector:
    positive = maximum(x, splat_f32x8(ZERO))
    return mul(mul(positive, positive), up)


@inline
def _sigmoid(x: Vector, up: Vector) -> Vector:
    return mul(sigmoid8(x), up)


@inline
def _tanh(x: Vector, up: Vector) -> Vector:
    return mul(tanh8(x), up)


@inline
def _exp_rest(x: Vector, up: Vector) -> Vector:
    below = minimum(x, splat_f32x8(ZERO))
    return mul(sub(sub(exp8(below), splat_f32x8(ONE)), below), up)


@inline
def _swiglu_oai(x: Vector, up: Vector) -> Vector:
    gate = minimum(x, splat_f32x8(LIMIT))
    clipped = minimum(maximum(up, splat_f32x8(-LIMIT)), splat_f32x8(LIMIT))
    return mul(mul(gate, sigmoid8(mul(splat_f32x8(ALPHA), gate))), add(clipped, splat_f32x8(ONE)))


FUNCTIONS = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "relu2": _relu2,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "exp_rest": _exp_rest,
    "swiglu_oai": _swiglu_oai,
}


def _activation(kind: str, gated: bool) -> Kernel:
    """args: gate, up, out, n elements; a unit is PIECE elements."""
    function = FUNCTIONS[kind]

    def activation(args: int, begin: int, end: int, scratch: int) -> None:
        gate, up, out = arg(args, 0), arg(args, 1), arg(args, 2)
        last = min(end * PIECE, arg(args, 3))
        for i in range(begin * PIECE, last - 7, 8):
            factor = splat_f32x8(ONE)
            if gated:
                factor = load_f32x8(up + 4 * i)
            store(out + 4 * i, function(load_f32x8(gate + 4 * i), factor))
        rest = last % 8
        if rest != 0:
            at = 4 * (last - rest)
            factor = splat_f32x8(ONE)
            if gated:
                factor = load_part(up + at, rest, scratch)
            store_part(out + at, function(load_part(gate + at, rest, scratch), factor), rest, scratch)

    return kernel(activation, f"activate_{kind}_{int(gated)}")


ACTIVATIONS = {(kind, gated): _activation(kind, gated) for kind in FUNCTIONS for gated in (False, True)}


def record_activate(tape: Tape, kind: str, gate: Buf, up: Buf | None) -> Buf:
    """f(gate) * up, or f(gate)."""
    out = tape.new(*gate.shape)
    n = gate.size
    args = (gate, 0 if up is None else up, out, n)
    reads = [gate] if up is None else [gate, up]
    item, units = ACTIVATIONS[kind, up is not None], pieces(n, PIECE)
    tape.op(item, units, args, reads=reads, writes=[out], step=0, scratch=SPARE, grain=(gate, PIECE))
    return out


@kernel
def add_scaled(args: int, begin: int, end: int, scratch: int) -> None:
    """out = a + s * b. args: a, b, out, elements of a unit, s."""
    a, b, out = arg(args, 0), arg(args, 1), arg(args, 2)
    first, last, s = begin * arg(args, 3), end * arg(args, 3), float_of_bits(arg(args, 4))
    factor = splat_f32x8(s)
    for i in range(first, last - 7, 8):
        store(out + 4 * i, fma(factor, load_f32x8(b + 4 * i), load_f32x8(a + 4 * i)))
    rest = (last - first) % 8
    if rest != 0:
        at = 4 * (last - rest)
        y = fma(factor, load_part(b + at, rest, scratch), load_part(a + at, rest, scratch + 32))
        store_part(out + at, y, rest, scratch)


def record_add(tape: Tape, a: Buf, b: Buf, scale: float) -> Buf:
    """a + scale * b, by rows: the norm that comes next can follow it."""
    out, d = tape.new(*a.shape), a.shape[-1]
    args = (a, b, out, d, np.float32(scale))
    tape.op(add_scaled, a.size // d, args, reads=[a, b], writes=[out], step=0, scratch=SPARE, grain=(a, d))
    return out


def _scaled(capped: bool) -> Kernel:
    """args: x, out, n, factor, cap, 1 / cap."""

    def scaled(args: int, begin: int, end: int, scratch: int) -> None:
        x, out, last = arg(args, 0), arg(args, 1), min(end * PIECE, arg(args, 2))
        factor, cap = splat_f32x8(float_of_bits(arg(args, 3))), splat_f32x8(float_of_bits(arg(args, 4)))
        inverse = splat_f32x8(float_of_bits(arg(args, 5)))
        for i in range(begin * PIECE, last - 7, 8):
            y = mul(load_f32x8(x + 4 * i), factor)
            if capped:
                y = mul(cap, tanh8(mul(y, inverse)))
            store(out + 4 * i, y)
        rest = last % 8
        if rest != 0:
            at = 4 * (last - rest)
            y = mul(load_part(x + at, rest, scratch), factor)
            if capped:
                y = mul(cap, tanh8(mul(y, inverse)))
            store_part(out + at, y, rest, scratch)

    return kernel(scaled, f"scale_{int(capped)}")


SCALES = {False: _scaled(False), True: _scaled(True)}


def record_scale(tape: Tape, x: Buf, factor: float, softcap: float) -> Buf:
    """x * factor, soft-capped when softcap > 0."""
    out = tape.new(*x.shape)
    inverse = 1 / softcap if softcap > 0 else 0.0
    args = (x, out, x.size, np.float32(factor), np.float32(softcap), np.float32(inverse))
    units = pieces(x.size, PIECE)
    tape.op(SCALES[softcap > 0], units, args, reads=[x], writes=[out], step=0, scratch=SPARE, grain=(x, PIECE))
    return out


@inline
def _copy(source: int, target: int, n: int) -> None:
    for j in range(0, n // 8 * 8, 8):
        store(target + 4 * j, load_f32x8(source + 4 * j))
    for j in range(n // 8 * 8, n):
        store_f32(target + 4 * j, load_f32(source + 4 * j))


@kernel
def take_rows(args: int, begin: int, end: int, scratch: int) -> None:
    """args: x, rows (int32), out, d; a unit is one row of out."""
    d = arg(args, 3)
    for i in range(begin, end):
        _copy(arg(args, 0) + 4 * d * load_i32(arg(args, 1) + 4 * i), arg(args, 2) + 4 * d * i, d)


@kernel
def copy_columns(args: int, begin: int, end: int, scratch: int) -> None:
    """args: x, out, d of x, first column, columns; a unit is one row."""
    d, width = arg(args, 2), arg(args, 4)
    for row in range(begin, end):
        _copy(arg(args, 0) + 4 * (d * row + arg(args, 3)), arg(args, 1) + 4 * width * row, width)


@kernel
def concat_rows(args: int, begin: int, end: int, scratch: int) -> None:
    """args: a, b, out, d of a, d of b; a unit is one row."""
    n_a, n_b = arg(args, 3), arg(args, 4)
    for row in range(begin, end):
        out = arg(args, 2) + 4 * (n_a + n_b) * row
        _copy(arg(args, 0) + 4 * n_a * row, out, n_a)
        _copy(arg(args, 1) + 4 * n_b * row, out + 4 * n_a, n_b)


def record_take(tape: Tape, x: Buf, rows: Any) -> Buf:
    """Rows of x (n, d)."""
    d = x.shape[1]
    n = tape.count(rows)
    out = tape.new(n, d)
    tape.op(take_rows, n, (x, rows, out, d), reads=[x], writes=[out])
    return out


def record_columns(tape: Tape, x: Buf, start: int, stop: int) -> Buf:
    """Columns start..stop of rows of x."""
    d, width = x.shape[-1], stop - start
    out = tape.new(*x.shape[:-1], width)
    tape.op(copy_columns, x.size // d, (x, out, d, start, width), reads=[x], writes=[out], step=8, grain=(x, d))
    return out


def record_concat(tape: Tape, a: Buf, b: Buf) -> Buf:
    """Rows of a and b side by side."""
    n_a, n_b = a.shape[-1], b.shape[-1]
    out = tape.new(*a.shape[:-1], n_a + n_b)
    args = (a, b, out, n_a, n_b)
    tape.op(concat_rows, a.size // n_a, args, reads=[a, b], writes=[out], step=8, grain=(a, n_a))
    return out
