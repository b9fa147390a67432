"""x (n, k) times F32, F16 or BF16 weights (m, k): eight partial sums by index mod 8, one FMA each, then a fixed tree.

    out[i, r] = tree(sum over j of x[i, j] * w[r, j] kept per j mod 8) + bias[r]

A unit is ROWS weight rows; for each group of them TOKENS rows of x share the loaded weights. Which group a row falls
into changes nothing in its sum, so one row, few rows and many rows give the same bits.
"""

from __future__ import annotations

from typing import Any

from edgellm.backends.cpu.arena import Buf
from edgellm.backends.cpu.jit import Kernel, inline, kernel
from edgellm.backends.cpu.simd import (
    Vector,
    float_of_bits,
    fma,
    load_bf16x8,
    load_f16,
    load_f16x8,
    load_f32,
    load_f32x8,
    load_u16,
    registers,
    splat_f32x8,
    store,
    store_f32,
    sum_f32x8,
    unroll,
)
from edgellm.backends.cpu.tape import Tape
from edgellm.backends.cpu.vecmath import ZERO, arg, load_part

__all__ = ["record_float_matmul"]

ROWS, TOKENS = 2, 4
UNIT = 16
"""Weight rows of one unit."""


@inline
def _f32_part(address: int, count: int, spare: int) -> Vector:
    return load_part(address, count, spare)


@inline
def _f16_part(address: int, count: int, spare: int) -> Vector:
    store(spare, splat_f32x8(ZERO))
    for i in range(count):
        store_f32(spare + 4 * i, load_f16(address + 2 * i))
    return load_f32x8(spare)


@inline
def _bf16_part(address: int, count: int, spare: int) -> Vector:
    store(spare, splat_f32x8(ZERO))
    for i in range(count):
        store_f32(spare + 4 * i, float_of_bits(load_u16(address + 2 * i) * 65536))
    return load_f32x8(spare)


FORMATS = {"F32": (4, load_f32x8, _f32_part), "F16": (2, load_f16x8, _f16_part), "BF16": (2, load_bf16x8, _bf16_part)}


def _tile(kind: str, rows: int, tokens: int) -> Any:
    item, load, part = FORMATS[kind]

    def tile(w: int, x: int, out: int, k: int, m: int, bias: int, spare: int) -> None:
        """`rows` weight rows at w times `tokens` rows at x."""
        acc = registers(rows * tokens)
        weight = registers(rows)
        for i in unroll(rows * tokens):
            acc[i] = splat_f32x8(ZERO)
        whole = k // 8 * 8
        for j in range(0, whole, 8):
            for r in unroll(rows):
                weight[r] = load(w + item * (k * r + j))
            for t in unroll(tokens):
                v = load_f32x8(x + 4 * (k * t + j))
                for r in unroll(rows):
                    acc[r * tokens + t] = fma(weight[r], v, acc[r * tokens + t])
        rest = k % 8
        if rest != 0:
            for r in unroll(rows):
                weight[r] = part(w + item * (k * r + whole), rest, spare)
            for t in unroll(tokens):
                v = load_part(x + 4 * (k * t + whole), rest, spare)
                for r in unroll(rows):
                    acc[r * tokens + t] = fma(weight[r], v, acc[r * tokens + t])
        for r in unroll(rows):
            for t in unroll(tokens):
                y = sum_f32x8(acc[r * tokens + t])
                if bias != 0:
                    y = y + load_f32(bias + 4 * r)
                store_f32(out + 4 * (m * t + r), y)

    return inline(tile)


def _matmul(kind: str) -> Kernel:
    """args: x, w, bias or 0, out, n, k, m."""
    item = FORMATS[kind][0]
    tile_24, tile_21 = _tile(kind, ROWS, TOKENS), _tile(kind, ROWS, 1)
    tile_14, tile_11 = _tile(kind, 1, TOKENS), _tile(kind, 1, 1)

    def matmul(args: int, begin: int, end: int, scratch: int) -> None:
        n, k, m = arg(args, 4), arg(args, 5), arg(args, 6)
        last = min(end * UNIT, m)
        for first in range(begin * UNIT, last, ROWS):
            w, bias = arg(args, 1) + item * k * first, arg(args, 2)
            if bias != 0:
                bias += 4 * first
            whole = n // TOKENS * TOKENS
            if first + ROWS <= last:
                for t in range(0, whole, TOKENS):
                    tile_24(w, arg(args, 0) + 4 * k * t, arg(args, 3) + 4 * (m * t + first), k, m, bias, scratch)
                for t in range(whole, n):
                    tile_21(w, arg(args, 0) + 4 * k * t, arg(args, 3) + 4 * (m * t + first), k, m, bias, scratch)
            else:
                for t in range(0, whole, TOKENS):
                    tile_14(w, arg(args, 0) + 4 * k * t, arg(args, 3) + 4 * (m * t + first), k, m, bias, scratch)
                for t in range(whole, n):
                    tile_11(w, arg(args, 0) + 4 * k * t, arg(args, 3) + 4 * (m * t + first), k, m, bias, scratch)

    return kernel(matmul, f"matmul_{kind.lower()}")


KERNELS = {kind: _matmul(kind) for kind in FORMATS}


def record_float_matmul(tape: Tape, x: Buf, kind: str, weight: int, bias: Any, out: Buf) -> None:
    """Append x (n, k) @ w (m, k)^T + bias to the tape; `weight`: address of the rows, `kind`: F32, F16 or BF16."""
    n, k = x.shape
    m = out.shape[1]
    args = (x, weight, 0 if bias is None else bias, out, n, k, m)
    tape.op(KERNELS[kind], -(-m // UNIT), args, reads=[x], writes=[out], step=0, scratch=64)
