"""Types with blocks of 32 weights times one token: a row's bytes are read in order, eight blocks at a time.

The values of a row's blocks (matmul_32.py) go to scratch; then eight rows together, one in each lane, take their blocks
in rising order, one FMA each. So no sum ever runs along a vector, and the order is that of the tile kernel.
"""

from __future__ import annotations

from functools import cache

from edgellm.backends.cpu.jit import Kernel, inline, kernel
from edgellm.backends.cpu.matmul_32 import Format32, codes_of
from edgellm.backends.cpu.matmul_args import (
    BIAS,
    N_BLOCKS,
    N_ROWS,
    N_TOKENS,
    OUT,
    OUT_STRIDE,
    ROW_BYTES,
    SUMS,
    WEIGHTS,
    D,
    Q,
)
from edgellm.backends.cpu.simd import (
    dot_u7,
    float_of_int,
    fma,
    fma_f32,
    load_f16,
    load_f32,
    load_f32x8,
    load_i8x32,
    load_i32,
    load_i32x8,
    load_i64,
    mul,
    prefetch,
    registers,
    splat_f32x8,
    splat_i32x8,
    store,
    store_f32,
    sub,
    sum_i32x8,
    to_f32x8,
    unroll,
)
from edgellm.backends.cpu.simd_dot import dot_signed
from edgellm.backends.cpu.simd_pack import load_e8m0, load_e8m0x8_apart, load_f16x8_apart, sums_of_eight, transpose_8x8
from edgellm.backends.cpu.simd_wide import LANES

AHEAD = 2048
"""Bytes ahead of a row's reads that are asked for; measured."""


@inline
def add_in_order(values: int, stride: int, n_blocks: int, d: int, out: int) -> None:
    """Eight rows' block values (`stride` bytes apart) -> eight sums at `out` (then 256 bytes of room)."""
    y = splat_f32x8(0.0)
    for b in range(0, n_blocks, 8):
        transpose_8x8(values + 4 * b, stride, out + 32, 32)
        last = n_blocks - b if n_blocks - b < 8 else 8
        for i in range(last):
            y = fma(load_f32x8(out + 32 + 32 * i), splat_f32x8(load_f32(d + 4 * (b + i))), y)
    store(out, y)


@cache
def row_kernel(form: Format32) -> Kernel:
    """Kernel over units of LANES rows; args as in matmul_args.py, one token a panel."""
    codes, type_size, signed, offset, minimum = (
        codes_of(form),
        form.type_size,
        form.sums == 0,
        form.offset,
        form.minimum,
    )
    load_d, load_d8 = (load_e8m0, load_e8m0x8_apart) if form.exponent else (load_f16, load_f16x8_apart)
    lines = (8 * type_size + 63) // 64

    @inline
    def dot(p: int, x: int):  # type: ignore[no-untyped-def]
        if signed:
            return dot_signed(codes(p), load_i8x32(x))
        else:
            return dot_u7(splat_i32x8(0), codes(p), load_i8x32(x))

    @inline
    def values_of_row(p: int, x: int, sums: int, n_blocks: int, values: int) -> None:
        whole = n_blocks // 8 * 8
        for b in range(0, whole, 8):
            for line in unroll(lines):
                prefetch(p + AHEAD + 64 * line)
            part = registers(8)
            for i in unroll(8):
                part[i] = dot(p + i * type_size, x + 32 * i)
            isum = sums_of_eight(part[0], part[1], part[2], part[3], part[4], part[5], part[6], part[7])
            d8 = load_d8(p, type_size)
            if offset != 0:
                isum = sub(isum, mul(load_i32x8(sums), splat_i32x8(offset)))
            value = mul(to_f32x8(isum), d8)
            if minimum:
                value = fma(to_f32x8(load_i32x8(sums)), load_f16x8_apart(p + 2, type_size), value)
            store(values + 4 * b, value)
            p += 8 * type_size
            x += 256
            sums += 32
        for b in range(whole, n_blocks):
            single = sum_i32x8(dot(p, x)) - offset * load_i32(sums)
            scaled = float_of_int(single) * load_d(p)
            if minimum:
                scaled = fma_f32(float_of_int(load_i32(sums)), load_f16(p + 2), scaled)
            store_f32(values + 4 * b, scaled)
            p += type_size
            x += 32
            sums += 4

    def rows(args: int, begin: int, end: int, scratch: int) -> None:
        row_bytes, n_rows, n_blocks = load_i64(args + ROW_BYTES), load_i64(args + N_ROWS), load_i64(args + N_BLOCKS)
        bias, n_tokens = load_i64(args + BIAS), load_i64(args + N_TOKENS)
        stop = end * LANES if end * LANES < n_rows else n_rows
        values, stride = scratch + 512, (n_blocks + 7) // 8 * 32
        for token in range(n_tokens):
            at = token * n_blocks
            x, sums, d = load_i64(args + Q) + 32 * at, load_i64(args + SUMS) + 4 * at, load_i64(args + D) + 4 * at
            out = load_i64(args + OUT) + token * load_i64(args + OUT_STRIDE)
            for first in range(begin * LANES, stop, 8):
                some = stop - first if stop - first < 8 else 8
                for r in range(some):
                    p = load_i64(args + WEIGHTS) + (first + r) * row_bytes
                    values_of_row(p, x, sums, n_blocks, values + r * stride)
                add_in_order(values, stride, n_blocks, d, scratch)
                for r in range(some):
                    y = load_f32(scratch + 4 * r)
                    if bias:
                        y += load_f32(bias + 4 * (first + r))
                    store_f32(out + 4 * (first + r), y)

    return kernel(rows, f"linear_{form.name}_row")


def row_scratch(n_blocks: int) -> int:
    """Bytes of scratch a thread needs."""
    return 512 + 8 * (-(-n_blocks // 8) * 32)
