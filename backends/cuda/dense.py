"""F32, F16 and BF16 weights times float32 activations; embedding rows of every type; half-precision tiles.

matvec   as in matmul.py: a warp per weight row, up to 8 rows of x per pass. A lane takes 8 weights at once: 16 bytes of
         F16 or BF16 (32 of F32) and 32 bytes of x per row. Rows that 8 does not divide (their start is not aligned)
         are read value by value.
         On paper (PTX of sm_80), one row: F16 2 bytes and 8.6 instructions per weight, BF16 2 and 8.1, F32 4 and 6.0;
         each further row adds 4.4.
embed    one thread per part of 32 weights (quantised) or per value.
half     rows of weights or activations as float16 for a library's matrix product. Each row of activations is divided
         by its largest value first, so that nothing leaves float16's range; `scale_rows` multiplies it back.
Twins: `edgellm.backends.reference` (embed, linear)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, types

from edgellm.backends.cuda.device import as_float, bits, f16, load4, load16, u16, warp_max, warp_sum
from edgellm.backends.cuda.unpack import Unpack

__all__ = ["DENSE_ROWS", "half_rows", "make_dense_matvec", "make_embed", "make_embed_dense", "scale_rows"]

f32, i32 = types.float32, types.int32
Kernel = Callable[..., Any]
DENSE_ROWS = 8
"""Rows of x per pass over the weights."""


@cuda.jit(device=True)
def _value(w, at, form):
    """Weight number `at` of an F32 (0), F16 (1) or BF16 (2) tensor."""
    if form == 0:
        return as_float(load4(w, 4 * at))
    if form == 1:
        return f16(u16(w, 2 * at))
    return as_float(u16(w, 2 * at) << 16)


@cuda.jit(device=True)
def _eight(w, at, form):
    """Weights at .. at + 7, `at` a multiple of 8."""
    if form == 0:
        a, b, c, d = load16(w, 4 * at)
        e, g, h, i = load16(w, 4 * at + 16)
        return as_float(a), as_float(b), as_float(c), as_float(d), as_float(e), as_float(g), as_float(h), as_float(i)
    a, b, c, d = load16(w, 2 * at)
    if form == 1:
        return f16(a), f16(a >> 16), f16(b), f16(b >> 16), f16(c), f16(c >> 16), f16(d), f16(d >> 16)
    return (
        *(as_float(a << 16), as_float(a & ~0xFFFF), as_float(b << 16), as_float(b & ~0xFFFF)),
        *(as_float(c << 16), as_float(c & ~0xFFFF), as_float(d << 16), as_float(d & ~0xFFFF)),
    )


def make_dense_matvec(form: int, rows: int, wide: bool) -> Kernel:
    """y (m, n): ceil(n / 4) blocks of 4 weight rows for `rows` rows of x at a time. `wide`: 8 divides k.

    `ids` empty: row t of y is row t of x times w. Else (`rows` 1) row t of y is row t // share of x times expert
    ids[t]. `x` is bytes, as w is."""

    @cuda.jit
    def matvec(w, ids, share, x, y, m, n, k):
        lane = cuda.threadIdx.x & 31
        blocks = (n + 3) // 4
        t0 = cuda.blockIdx.x // blocks * rows
        row = cuda.blockIdx.x % blocks * 4 + (cuda.threadIdx.x >> 5)
        expert = ids[t0] if ids.size > 0 else 0
        acc = cuda.local.array(rows, types.float32)
        for r in range(rows):
            acc[r] = f32(0.0)
        if row < n:
            base = (expert * n + row) * k
            if wide:
                for i in range(8 * lane, k, 256):
                    w0, w1, w2, w3, w4, w5, w6, w7 = _eight(w, base + i, form)
                    for r in range(rows):
                        at = min(t0 + r, m - 1) // share * k + i
                        x0, x1, x2, x3, x4, x5, x6, x7 = _eight(x, at, 0)
                        acc[r] += w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3 + (w4 * x4 + w5 * x5 + w6 * x6 + w7 * x7)
            else:
                for i in range(lane, k, 32):
                    value = _value(w, base + i, form)
                    for r in range(rows):
                        acc[r] += value * _value(x, min(t0 + r, m - 1) // share * k + i, 0)
        for r in range(rows):
            total = warp_sum(acc[r])
            if lane == 0 and row < n and t0 + r < m:
                y[(t0 + r) * n + row] = total

    return matvec


def make_embed_dense(form: int) -> Kernel:
    """Rows of an F32, F16 or BF16 table: one thread per value. `ids` empty: rows start .. one after another."""

    @cuda.jit
    def embed(w, ids, start, y, dim, total):
        i = cuda.grid(1)
        if i < total:
            row = ids[i // dim] if ids.size > 0 else start + i // dim
            y[i] = _value(w, row * dim + i % dim, form)

    return embed


@cuda.jit(device=True)
def _signed(word, at):
    """The byte at bit `at` of a word, as float32."""
    return f32(i32((bits(word, at, 8) ^ 128) - 128))


@cuda.jit(device=True)
def _four(word, s, m, y, at):
    """s * q - m of the four signed bytes of a word."""
    y[at] = s * _signed(word, 0) - m
    y[at + 1] = s * _signed(word, 8) - m
    y[at + 2] = s * _signed(word, 16) - m
    y[at + 3] = s * _signed(word, 24) - m


def make_embed(kind: Unpack, block: int, size: int) -> Kernel:
    """As make_embed_dense for a quantised table: one thread per part of 32 weights. y: float32 or float16."""
    unpack, first, second = kind
    parts = block // 32

    @cuda.jit
    def embed(w, ids, start, y, dim, total):
        i = cuda.grid(1)
        if i >= total:
            return
        row, p = i // (dim // 32), i % (dim // 32)
        b, part = p // parts, p % parts
        source = ids[row] if ids.size > 0 else start + row
        at = (source * (dim // block) + b) * size
        q0, q1, q2, q3, q4, q5, q6, q7, s0, s1, m0, m1 = unpack(w, at, part)
        h0, h1 = row * dim + b * block + first(part), row * dim + b * block + second(part)
        _four(q0, s0, m0, y, h0)
        _four(q1, s0, m0, y, h0 + 4)
        _four(q2, s0, m0, y, h0 + 8)
        _four(q3, s0, m0, y, h0 + 12)
        _four(q4, s1, m1, y, h1)
        _four(q5, s1, m1, y, h1 + 4)
        _four(q6, s1, m1, y, h1 + 8)
        _four(q7, s1, m1, y, h1 + 12)

    return embed


@cuda.jit
def half_rows(x, y, scales, n_rows, k):
    """y = float16 of each row of x over its largest value, which goes to `scales`. A warp per row."""
    lane = cuda.threadIdx.x & 31
    row = cuda.blockIdx.x * (cuda.blockDim.x >> 5) + (cuda.threadIdx.x >> 5)
    top = f32(0.0)
    if row < n_rows:
        for i in range(lane, k, 32):
            top = max(top, abs(x[row * k + i]))
    top = warp_max(top)
    if row < n_rows:
        inverse = f32(1.0) / top if top > f32(0.0) else f32(0.0)
        for i in range(lane, k, 32):
            y[row * k + i] = x[row * k + i] * inverse
        if lane == 0:
            scales[row] = top


@cuda.jit
def scale_rows(y, scales, n, total):
    """Row r of y (m, n) times scales[r], in place."""
    i = cuda.grid(1)
    if i < total:
        y[i] *= scales[i // n]
