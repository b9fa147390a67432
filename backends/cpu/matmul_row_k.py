"""K-type weights times one token: a row's bytes are read in order, super-block by super-block.

Numbers and their order as in matmul_tile_k.py: integers exact, then value and one FMA per super-block.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from edgellm.backends.cpu.jit import Inline, Kernel, inline, kernel
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
    Vector,
    add,
    bit_and,
    bit_or,
    float_of_int,
    fma_f32,
    load_f16,
    load_f32,
    load_i8x16,
    load_i8x32,
    load_i16x16,
    load_i64,
    load_u16,
    load_u32,
    mul_pairs_i16,
    permute,
    prefetch,
    shift_left,
    sign_extend_i8x16,
    splat_i8x16,
    splat_i8x32,
    splat_i16x16,
    splat_i32x8,
    store_f32,
    sub,
    sum_i32x8,
    unroll,
)
from edgellm.backends.cpu.simd_dot import dot_scaled, dot_scaled_signed
from edgellm.backends.cpu.simd_pack import i8x16_of, i16x8_of_bytes, load_nibbles, lookup, shifted, spread
from edgellm.backends.cpu.simd_wide import LANES

AHEAD = 2048
"""Bytes ahead of a row's reads that are asked for; measured."""


@inline
def low4(x: Vector) -> Vector:
    """Low nibbles."""
    return bit_and(x, splat_i8x32(15))


@inline
def high4(x: Vector) -> Vector:
    """High nibbles."""
    return low4(shifted(x, -4))


@inline
def minima_of(p: int) -> int:
    """Q4_K's eight 6-bit minima as bytes of an int64."""
    b, c = load_u32(p + 4), load_u32(p + 8)
    return (b & 0x3F3F3F3F) | ((((c >> 4) & 0x0F0F0F0F) | (((b >> 6) & 0x03030303) << 4)) << 32)


@inline
def scales_of(p: int) -> int:
    """Q4_K's eight 6-bit scales as bytes of an int64."""
    a, c = load_u32(p), load_u32(p + 8)
    return (a & 0x3F3F3F3F) | (((c & 0x0F0F0F0F) | (((a >> 6) & 0x03030303) << 4)) << 32)


twice = permute("i16x8", list(range(8)) * 2)
doubled = permute("i16x8", [i // 2 for i in range(16)])
evens_first = permute("i8x16", [*range(0, 16, 2), *range(1, 16, 2)])


@inline
def value_with_minima(p: int, isum: Vector, msum: Vector) -> np.float32:
    """d isum - dmin msum; d and dmin at p."""
    scaled = float_of_int(sum_i32x8(isum)) * load_f16(p)
    return scaled - float_of_int(sum_i32x8(msum)) * load_f16(p + 2)


@inline
def q4_k(p: int, x: int, sums: int) -> np.float32:
    """One super-block of Q4_K times 256 int8."""
    scales = twice(i16x8_of_bytes(scales_of(p + 4)))
    msum = mul_pairs_i16(doubled(i16x8_of_bytes(minima_of(p + 4))), load_i16x16(sums))
    isum, other = splat_i32x8(0), splat_i32x8(0)
    for j in unroll(4):
        w = load_i8x32(p + 16 + 32 * j)
        isum = dot_scaled(isum, low4(w), load_i8x32(x + 64 * j), spread(scales, 2 * j))
        other = dot_scaled(other, high4(w), load_i8x32(x + 64 * j + 32), spread(scales, 2 * j + 1))
    return value_with_minima(p, add(isum, other), msum)


@inline
def q6_k(p: int, x: int, sums: int) -> np.float32:
    """One super-block of Q6_K times 256 int8."""
    signed = load_i8x16(p + 192)
    scales = sign_extend_i8x16(evens_first(signed))
    msum = mul_pairs_i16(sign_extend_i8x16(signed), load_i16x16(sums))
    isum, other = splat_i32x8(0), splat_i32x8(0)
    top = splat_i8x32(0x30)
    for n in unroll(2):
        a, b, h = load_i8x32(p + 64 * n), load_i8x32(p + 64 * n + 32), load_i8x32(p + 128 + 32 * n)
        y = x + 128 * n
        c = bit_or(low4(a), bit_and(shifted(h, 4), top))
        isum = dot_scaled(isum, c, load_i8x32(y), spread(scales, 4 * n))
        c = bit_or(low4(b), bit_and(shifted(h, 2), top))
        other = dot_scaled(other, c, load_i8x32(y + 32), spread(scales, 4 * n + 1))
        c = bit_or(high4(a), bit_and(h, top))
        isum = dot_scaled(isum, c, load_i8x32(y + 64), spread(scales, 4 * n + 2))
        c = bit_or(high4(b), bit_and(shifted(h, -2), top))
        other = dot_scaled(other, c, load_i8x32(y + 96), spread(scales, 4 * n + 3))
    exact = sub(add(isum, other), shift_left(msum, 5))
    return float_of_int(sum_i32x8(exact)) * load_f16(p + 208)


@inline
def q5_k(p: int, x: int, sums: int) -> np.float32:
    """One super-block of Q5_K times 256 int8."""
    scales = twice(i16x8_of_bytes(scales_of(p + 4)))
    msum = mul_pairs_i16(doubled(i16x8_of_bytes(minima_of(p + 4))), load_i16x16(sums))
    isum, other = splat_i32x8(0), splat_i32x8(0)
    fifth, h = splat_i8x32(16), load_i8x32(p + 16)
    for j in unroll(4):
        w = load_i8x32(p + 48 + 32 * j)
        c = bit_or(low4(w), bit_and(shifted(h, 4 - 2 * j), fifth))
        isum = dot_scaled(isum, c, load_i8x32(x + 64 * j), spread(scales, 2 * j))
        c = bit_or(high4(w), bit_and(shifted(h, 3 - 2 * j), fifth))
        other = dot_scaled(other, c, load_i8x32(x + 64 * j + 32), spread(scales, 2 * j + 1))
    return value_with_minima(p, add(isum, other), msum)


@inline
def q2_k(p: int, x: int, sums: int) -> np.float32:
    """One super-block of Q2_K times 256 int8."""
    both = load_i8x16(p)
    scales = sign_extend_i8x16(evens_first(bit_and(both, splat_i8x16(15))))
    minima = sign_extend_i8x16(bit_and(shifted(both, -4), splat_i8x16(15)))
    msum = mul_pairs_i16(minima, load_i16x16(sums))
    isum, three = splat_i32x8(0), splat_i8x32(3)
    for n in unroll(2):
        w = load_i8x32(p + 16 + 32 * n)
        for j in unroll(4):
            c = bit_and(shifted(w, -2 * j), three)
            isum = dot_scaled(isum, c, load_i8x32(x + 128 * n + 32 * j), spread(scales, 4 * n + j))
    return value_with_minima(p + 80, isum, msum)


@inline
def q3_scales(p: int) -> Vector:
    """Q3_K's sixteen 6-bit scales as bytes 0..63."""
    a, b, c = load_u32(p), load_u32(p + 4), load_u32(p + 8)
    s0 = (a & 0x0F0F0F0F) | ((c & 0x03030303) << 4)
    s1 = (b & 0x0F0F0F0F) | (((c >> 2) & 0x03030303) << 4)
    s2 = ((a >> 4) & 0x0F0F0F0F) | (((c >> 4) & 0x03030303) << 4)
    s3 = ((b >> 4) & 0x0F0F0F0F) | (((c >> 6) & 0x03030303) << 4)
    return i8x16_of(s0 | (s1 << 32), s2 | (s3 << 32))


@inline
def q3_k(p: int, x: int, sums: int) -> np.float32:
    """One super-block of Q3_K times 256 int8."""
    scales = sub(q3_scales(p + 96), splat_i8x16(32))
    msum = mul_pairs_i16(sign_extend_i8x16(scales), load_i16x16(sums))
    spaced = sign_extend_i8x16(evens_first(scales))
    isum, three, third, h = splat_i32x8(0), splat_i8x32(3), splat_i8x32(4), load_i8x32(p)
    for n in unroll(2):
        w = load_i8x32(p + 32 + 32 * n)
        for j in unroll(4):
            c = bit_or(bit_and(shifted(w, -2 * j), three), bit_and(shifted(h, 2 - 4 * n - j), third))
            isum = dot_scaled(isum, c, load_i8x32(x + 128 * n + 32 * j), spread(spaced, 4 * n + j))
    exact = sub(isum, shift_left(msum, 2))
    return float_of_int(sum_i32x8(exact)) * load_f16(p + 108)


@inline
def iq4_scales(p: int) -> int:
    """IQ4_XS's eight 6-bit scales as bytes 0..63 of an int64."""
    high, low = load_u16(p), load_u32(p + 2)
    low = (low | (low << 16)) & 0x0000FFFF0000FFFF
    low = (low | (low << 8)) & 0x00FF00FF00FF00FF
    low = (low | (low << 4)) & 0x0F0F0F0F0F0F0F0F
    high = (high | (high << 24)) & 0x000000FF000000FF
    high = (high | (high << 12)) & 0x000F000F000F000F
    high = (high | (high << 6)) & 0x0303030303030303
    return low | (high << 4)


iq4_values = lookup("iq4", 32, 0)


@inline
def iq4_xs(p: int, x: int, sums: int) -> np.float32:
    """One super-block of IQ4_XS times 256 int8."""
    scales = sub(twice(i16x8_of_bytes(iq4_scales(p + 2))), splat_i16x16(32))
    isum, other = splat_i32x8(0), splat_i32x8(0)
    for j in unroll(4):
        w = iq4_values(load_nibbles(p + 8 + 32 * j))
        isum = dot_scaled_signed(isum, w, load_i8x32(x + 64 * j), spread(scales, 2 * j))
        w = iq4_values(load_nibbles(p + 24 + 32 * j))
        other = dot_scaled_signed(other, w, load_i8x32(x + 64 * j + 32), spread(scales, 2 * j + 1))
    return float_of_int(sum_i32x8(add(isum, other))) * load_f16(p)


BLOCKS = {"q2_k": q2_k, "q3_k": q3_k, "q4_k": q4_k, "q5_k": q5_k, "q6_k": q6_k, "iq4_xs": iq4_xs}


@cache
def row_kernel(name: str, type_size: int) -> Kernel:
    """Kernel over units of LANES rows; args as in matmul_args.py, one token a panel."""
    block: Inline = BLOCKS[name]

    def rows(args: int, begin: int, end: int, scratch: int) -> None:
        row_bytes, n_rows, n_blocks = load_i64(args + ROW_BYTES), load_i64(args + N_ROWS), load_i64(args + N_BLOCKS)
        bias, n_tokens = load_i64(args + BIAS), load_i64(args + N_TOKENS)
        stop = end * LANES if end * LANES < n_rows else n_rows
        for token in range(n_tokens):
            q = load_i64(args + Q) + 256 * n_blocks * token
            out = load_i64(args + OUT) + token * load_i64(args + OUT_STRIDE)
            for row in range(begin * LANES, stop):
                p, x = load_i64(args + WEIGHTS) + row * row_bytes, q
                sums, d = load_i64(args + SUMS) + 32 * n_blocks * token, load_i64(args + D) + 4 * n_blocks * token
                y = np.float32(0.0)
                for _ in range(n_blocks):
                    for line in unroll((type_size + 63) // 64):
                        prefetch(p + AHEAD + 64 * line)
                    y = fma_f32(block(p, x, sums), load_f32(d), y)
                    p += type_size
                    x += 256
                    sums += 32
                    d += 4
                if bias:
                    y += load_f32(bias + 4 * row)
                store_f32(out + 4 * row, y)

    return kernel(rows, f"linear_{name}_row")
