"""K-type weights times one token: a row's bytes are read in order, four super-blocks at a time.

Numbers and their order as in matmul_tile_k.py: integers exact, then value and one FMA per super-block (matmul_row.py).
Per type, `isum` gives eight partial sums of scale x code x activation, `msum` of group offset x activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from edgellm.backends.cpu import matmul_row, matmul_row_512
from edgellm.backends.cpu.jit import Inline, Kernel, inline
from edgellm.backends.cpu.simd import (
    ISA,
    Vector,
    add,
    bit_and,
    bit_or,
    load_i8x16,
    load_i8x32,
    load_i16x16,
    load_i32x4,
    load_u16,
    load_u32,
    mul,
    mul_pairs_i16,
    permute,
    permute2,
    prefetch_far,
    registers,
    reinterpret,
    shift_left,
    sign_extend_i8x16,
    splat_i8x16,
    splat_i8x32,
    splat_i16x16,
    splat_i32x4,
    splat_i32x8,
    store,
    sub,
    to_f32x4,
    to_f32x8,
    twice_i8x16,
    unroll,
    zero_extend_i8x16,
)
from edgellm.backends.cpu.simd_dot import dot_scaled, dot_scaled_signed
from edgellm.backends.cpu.simd_pack import (
    high_f32x8,
    i8x16_of,
    i16x8_of_bytes,
    load_f16_of_four,
    load_f16_pairs_of_four,
    load_nibbles,
    lookup,
    low_f32x8,
    shifted,
    spread,
    spread_bytes,
    sums_of_eight,
    sums_of_four,
)


@inline
def low4(x: Vector) -> Vector:
    """Low nibbles."""
    return bit_and(x, splat_i8x32(15))


@inline
def high4(x: Vector) -> Vector:
    """High nibbles."""
    return low4(shifted(x, -4))


_c_and_c4, _by_kind = permute2("i32x4", [3, 3, 7, 7]), permute2("i32x4", [1, 5, 2, 6])
as_bytes = reinterpret("i32x4", "i8x16")


@inline
def scales_and_minima(p: int) -> Vector:
    """The first 16 bytes of a Q4_K super-block -> its eight 6-bit scales, then its eight minima, as bytes.

    Words: d and dmin; scales 0..3 and, above them, two bits of 4..7; the same of the minima; the other four bits."""
    words = load_i32x4(p)
    first = bit_and(words, splat_i32x4(0x3F3F3F3F))
    lows = bit_and(_c_and_c4(words, shifted(words, -4)), splat_i32x4(0x0F0F0F0F))
    second = bit_or(bit_and(shifted(words, -2), splat_i32x4(0x30303030)), lows)
    return as_bytes(_by_kind(first, second))


minima_doubled = permute("i8x16", [8 + i // 2 for i in range(16)])
twice = permute("i16x8", list(range(8)) * 2)
evens_first = permute("i8x16", [*range(0, 16, 2), *range(1, 16, 2)])


@inline
def q4_k(p: int, x: int) -> Vector:
    """isum of one super-block of Q4_K with 256 int8."""
    scales = twice_i8x16(scales_and_minima(p))
    isum, other = splat_i32x8(0), splat_i32x8(0)
    for j in unroll(4):
        w = load_i8x32(p + 16 + 32 * j)
        isum = dot_scaled(isum, low4(w), load_i8x32(x + 64 * j), spread_bytes(scales, 2 * j))
        other = dot_scaled(other, high4(w), load_i8x32(x + 64 * j + 32), spread_bytes(scales, 2 * j + 1))
    return add(isum, other)


@inline
def q4_k_minima(p: int, sums: int) -> Vector:
    """msum of Q4_K and Q5_K."""
    return mul_pairs_i16(zero_extend_i8x16(minima_doubled(scales_and_minima(p))), load_i16x16(sums))


@inline
def q6_k(p: int, x: int) -> Vector:
    """isum of one super-block of Q6_K with 256 int8."""
    scales = sign_extend_i8x16(evens_first(load_i8x16(p + 192)))
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
    return add(isum, other)


@inline
def q6_k_offsets(p: int, sums: int) -> Vector:
    """msum of Q6_K: its offsets are the scales, 32 of each."""
    return shift_left(mul_pairs_i16(sign_extend_i8x16(load_i8x16(p + 192)), load_i16x16(sums)), 5)


@inline
def q5_k(p: int, x: int) -> Vector:
    """isum of one super-block of Q5_K with 256 int8."""
    scales = twice_i8x16(scales_and_minima(p))
    isum, other = splat_i32x8(0), splat_i32x8(0)
    fifth, h = splat_i8x32(16), load_i8x32(p + 16)
    for j in unroll(4):
        w = load_i8x32(p + 48 + 32 * j)
        c = bit_or(low4(w), bit_and(shifted(h, 4 - 2 * j), fifth))
        isum = dot_scaled(isum, c, load_i8x32(x + 64 * j), spread_bytes(scales, 2 * j))
        c = bit_or(high4(w), bit_and(shifted(h, 3 - 2 * j), fifth))
        other = dot_scaled(other, c, load_i8x32(x + 64 * j + 32), spread_bytes(scales, 2 * j + 1))
    return add(isum, other)


@inline
def q2_k(p: int, x: int) -> Vector:
    """isum of one super-block of Q2_K with 256 int8."""
    scales = sign_extend_i8x16(evens_first(bit_and(load_i8x16(p), splat_i8x16(15))))
    isum, three = splat_i32x8(0), splat_i8x32(3)
    for n in unroll(2):
        w = load_i8x32(p + 16 + 32 * n)
        for j in unroll(4):
            c = bit_and(shifted(w, -2 * j), three)
            isum = dot_scaled(isum, c, load_i8x32(x + 128 * n + 32 * j), spread(scales, 4 * n + j))
    return isum


@inline
def q2_k_minima(p: int, sums: int) -> Vector:
    """msum of Q2_K."""
    minima = sign_extend_i8x16(bit_and(shifted(load_i8x16(p), -4), splat_i8x16(15)))
    return mul_pairs_i16(minima, load_i16x16(sums))


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
def q3_k(p: int, x: int) -> Vector:
    """isum of one super-block of Q3_K with 256 int8."""
    spaced = sign_extend_i8x16(evens_first(sub(q3_scales(p + 96), splat_i8x16(32))))
    isum, three, third, h = splat_i32x8(0), splat_i8x32(3), splat_i8x32(4), load_i8x32(p)
    for n in unroll(2):
        w = load_i8x32(p + 32 + 32 * n)
        for j in unroll(4):
            c = bit_or(bit_and(shifted(w, -2 * j), three), bit_and(shifted(h, 2 - 4 * n - j), third))
            isum = dot_scaled(isum, c, load_i8x32(x + 128 * n + 32 * j), spread(spaced, 4 * n + j))
    return isum


@inline
def q3_k_offsets(p: int, sums: int) -> Vector:
    """msum of Q3_K: its offsets are the scales, 4 of each."""
    scales = sign_extend_i8x16(sub(q3_scales(p + 96), splat_i8x16(32)))
    return shift_left(mul_pairs_i16(scales, load_i16x16(sums)), 2)


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
def iq4_xs(p: int, x: int) -> Vector:
    """isum of one super-block of IQ4_XS with 256 int8."""
    scales = sub(twice(i16x8_of_bytes(iq4_scales(p + 2))), splat_i16x16(32))
    isum, other = splat_i32x8(0), splat_i32x8(0)
    for j in unroll(4):
        w = iq4_values(load_nibbles(p + 8 + 32 * j))
        isum = dot_scaled_signed(isum, w, load_i8x32(x + 64 * j), spread(scales, 2 * j))
        w = iq4_values(load_nibbles(p + 24 + 32 * j))
        other = dot_scaled_signed(other, w, load_i8x32(x + 64 * j + 32), spread(scales, 2 * j + 1))
    return add(isum, other)


@inline
def no_offsets(p: int, sums: int) -> Vector:
    """msum of a type that has none."""
    return splat_i32x8(0)


@dataclass(frozen=True)
class RowFormat:
    """One K type: its two sums, where d lies, and whether msum is of minima with a float16 dmin after d (otherwise it
    is taken off isum)."""

    isum: Inline
    msum: Inline
    d_at: int
    minima: bool = False


FORMATS = {
    "q2_k": RowFormat(q2_k, q2_k_minima, 80, minima=True),
    "q3_k": RowFormat(q3_k, q3_k_offsets, 108),
    "q4_k": RowFormat(q4_k, q4_k_minima, 0, minima=True),
    "q5_k": RowFormat(q5_k, q4_k_minima, 0, minima=True),
    "q6_k": RowFormat(q6_k, q6_k_offsets, 208),
    "iq4_xs": RowFormat(iq4_xs, no_offsets, 0),
}


@cache
def row_kernel(name: str, type_size: int) -> Kernel:
    """The one-token kernel of a K type."""
    if ISA == "avx512" and name in matmul_row_512.FORMATS:
        return matmul_row_512.row_kernel(name)
    form = FORMATS[name]
    isum, msum, d_at, minima = form.isum, form.msum, form.d_at, form.minima
    lines, ahead = (4 * type_size + 63) // 64, matmul_row.AHEAD

    @inline
    def values_of_row(p: int, x: int, sums: int, n_blocks: int, values: int) -> None:
        for b in range(0, n_blocks, 4):
            # A last group that is short takes its last block several times; those values are not used.
            last = n_blocks - b - 1
            at, a, m = registers(4), registers(4), registers(4)
            for i in unroll(4):
                for line in unroll(lines // 4 + (lines % 4 > i)):
                    prefetch_far(p + ahead + 64 * (i * (lines // 4) + min(i, lines % 4) + line))
                k = min(i, last)
                at[i] = p + k * type_size
                a[i] = isum(at[i], x + 256 * k)
                m[i] = msum(at[i], sums + 32 * k)
            if minima:
                both = to_f32x8(sums_of_eight(a[0], a[1], a[2], a[3], m[0], m[1], m[2], m[3]))
                d = load_f16_pairs_of_four(at[0] + d_at, at[1] + d_at, at[2] + d_at, at[3] + d_at)
                both = mul(both, d)
                store(values + 4 * b, sub(low_f32x8(both), high_f32x8(both)))
            else:
                for i in unroll(4):
                    a[i] = sub(a[i], m[i])
                d = load_f16_of_four(at[0] + d_at, at[1] + d_at, at[2] + d_at, at[3] + d_at)
                store(values + 4 * b, mul(to_f32x4(sums_of_four(a[0], a[1], a[2], a[3])), d))
            p += 4 * type_size
            x += 1024
            sums += 128

    return matmul_row.row_kernel(name, 256, values_of_row)
