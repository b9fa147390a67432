"""K-type weights times up to eight tokens with AVX-512: the products of matmul_tile_k.py, codes kept in registers.

Where all tokens fit in one go, a piece's codes are used as soon as they are unpacked. Only what is left of the tile is
written: scales, offsets, and bits of several pieces.
"""

from __future__ import annotations

from functools import cache

from edgellm.backends.cpu.jit import Kernel, kernel
from edgellm.backends.cpu.matmul_args import (
    BIAS,
    N_BLOCKS,
    N_ROWS,
    N_TOKENS,
    ORDER,
    OUT,
    OUT_STRIDE,
    ROW_BYTES,
    SUMS,
    WEIGHTS,
    D,
    Q,
)
from edgellm.backends.cpu.matmul_tile_k import (
    OFFSETS,
    SCALES,
    TILE_BYTES,
    VECTOR,
    KFormat,
    first_code,
    value_from,
)
from edgellm.backends.cpu.simd import add, fma, load_i32, load_i64, mul, prefetch, registers, store, unroll
from edgellm.backends.cpu.simd_dot import add_pairs, dot_unsigned, dot_wide
from edgellm.backends.cpu.simd_wide import (
    LANES,
    WIDE_OFFSET,
    broadcast_bytes,
    broadcast_floats,
    broadcast_pairs,
    load_floats,
    load_ints,
    load_pairs,
    splat_floats,
    splat_ints,
)

__all__ = ["PANELS", "few_kernel"]

PANELS = {"q2_k": (1, 2, 4, 8), "q3_k": (1, 2, 4, 8), "q4_k": (4, 8), "iq4_xs": (4, 8)} if LANES == 16 else {}
"""Types and panel widths for which it is the fastest. Q5_K and Q6_K need too many registers for eight tokens."""


@cache
def few_kernel(form: KFormat, panel: int) -> Kernel:
    """Kernel over units of LANES rows; args and scratch as for `tile_kernel`, but one panel."""
    scales_of, codes_of, value_of, apart = form.scales, form.codes, value_from(form), form.apart
    type_size, vectors, groups = form.type_size, form.group // 4, 32 // form.group
    dot = dot_wide if form.sums == 0 else dot_unsigned
    by_sums = form.sums != 0 or form.offset + WIDE_OFFSET != 0
    lines = -(-LANES * type_size // 256)

    def few(args: int, begin: int, end: int, scratch: int) -> None:
        row_bytes, n_rows, n_blocks = load_i64(args + ROW_BYTES), load_i64(args + N_ROWS), load_i64(args + N_BLOCKS)
        n_tokens, order = load_i64(args + N_TOKENS), load_i64(args + ORDER)
        partial = scratch + TILE_BYTES
        for unit in range(begin, end):
            row = unit * LANES if unit * LANES + LANES <= n_rows else n_rows - LANES
            weights = load_i64(args + WEIGHTS) + row * row_bytes
            q, sums, d = load_i64(args + Q), load_i64(args + SUMS), load_i64(args + D)
            for t in unroll(panel):
                store(partial + t * VECTOR, splat_floats(0.0))
            for b in range(n_blocks):
                source, ahead = weights + b * type_size, weights + LANES * row_bytes + b * (LANES * type_size)
                scales_of(source, row_bytes, scratch)
                total, dots = registers(panel), registers(panel)
                for t in unroll(panel):
                    total[t] = splat_ints(0)
                for piece in range(4):
                    for line in unroll(lines):  # the next rows
                        prefetch(ahead + 64 * (lines * piece + line))
                    codes, first = codes_of(source, row_bytes, scratch, piece), first_code(piece, apart)
                    for part in unroll(2 * groups):
                        place = first + part // groups * apart + part % groups * vectors
                        scale = load_ints(scratch + SCALES + place // vectors * VECTOR)
                        for t in unroll(panel):
                            dots[t] = splat_ints(0)
                        for k in unroll(vectors):
                            for t in unroll(panel):
                                x = broadcast_bytes(q + 4 * place + 4 * k + 256 * t)
                                dots[t] = dot(dots[t], codes[vectors * part + k], x)
                        for t in unroll(panel):
                            total[t] = add(total[t], mul(dots[t], scale))
                for t in unroll(panel):
                    dots[t] = splat_ints(0)
                if by_sums:
                    for j in range(8):
                        pair = load_pairs(scratch + OFFSETS + j * VECTOR)
                        for t in unroll(panel):
                            dots[t] = add_pairs(dots[t], pair, broadcast_pairs(sums + 32 * t + 4 * j))
                for t in unroll(panel):
                    y = partial + t * VECTOR
                    value = value_of(total[t], dots[t], scratch)
                    store(y, fma(value, broadcast_floats(d + 4 * t), load_floats(y)))
                q, sums, d = q + panel * 256, sums + panel * 32, d + panel * 4
            out, bias = load_i64(args + OUT) + 4 * row, load_i64(args + BIAS)
            for token in range(n_tokens):
                y = load_floats(partial + token * VECTOR)
                if bias:
                    y = add(y, load_floats(bias + 4 * row))
                place = load_i32(order + 4 * token) if order else token
                store(out + place * load_i64(args + OUT_STRIDE), y)

    return kernel(few, f"linear_{form.name}_few{panel}")
