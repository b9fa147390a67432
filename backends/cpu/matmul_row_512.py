"""K-type weights times one token in 512-bit vectors, four super-blocks at a time (AVX-512 with VNNI).

The same integers as in matmul_row_k.py from fewer instructions. A vector holds 64 codes; `vpdpbusd` adds products of
four; two such results are packed into int16 (4 x 63 x 127 fits), and one `vpdpwssd` multiplies them by their scales.
Scales of four super-blocks are unpacked together. The activations are arranged once a call, so that they lie as codes
come out of a vector; what codes are stored plus is taken off where the products start.
"""

from __future__ import annotations

from functools import cache

from edgellm.backends.cpu import matmul_row
from edgellm.backends.cpu.jit import Inline, Kernel, inline
from edgellm.backends.cpu.simd import (
    Vector,
    add,
    bit_and,
    bit_or,
    load_i8x16,
    load_i8x32,
    load_i8x64,
    load_i16x16,
    load_i32x16,
    mul,
    mul_pairs_i16,
    permute2,
    prefetch_far,
    registers,
    reinterpret,
    sign_extend_i8x16,
    splat_i8x64,
    splat_i16x16,
    splat_i32x16,
    store,
    sub,
    to_f32x4,
    to_f32x8,
    unroll,
)
from edgellm.backends.cpu.simd_512 import (
    first_of_each,
    halves_to_floats,
    in_each,
    join_i32x4,
    load_iq4_scales,
    load_twice,
    load_words_of_four,
    low_words,
    opaque,
    pack,
    scales_of_lanes,
    scales_of_nibbles,
    scales_of_sixteens,
    shifted_halves,
    sums_in_each,
    sums_of_four_wide,
)
from edgellm.backends.cpu.simd_dot import add_pairs, dot_unsigned
from edgellm.backends.cpu.simd_pack import high_f32x8, load_f16_of_four, lookup, low_f32x8, shifted
from edgellm.backends.cpu.simd_wide import load_pairs

__all__ = ["FORMATS", "row_kernel"]


@inline
def low4(x: Vector) -> Vector:
    """Low nibbles."""
    return bit_and(x, splat_i8x64(15))


@inline
def high4(x: Vector) -> Vector:
    """High nibbles."""
    return low4(shifted(x, -4))


@inline
def group_start(b: int, n_blocks: int) -> int:
    """First block of a group of four: the last group goes back until it is whole (blocks done twice get the same
    value)."""
    return max(min(b, n_blocks - 4), 0)


# Q4_K and Q5_K: 6-bit scales and minima of 32 weights.
_as_bytes, _as_words = reinterpret("i32x16", "i8x64"), reinterpret("i8x64", "i16x32")
_c_and_c4, _by_kind = permute2("i32x16", in_each([3, 3, 7, 7])), permute2("i32x16", in_each([1, 2, 5, 6]))
_WIDENED = [n for at in range(0, 64, 16) for i in (0, 1, 2, 3, 8, 9, 10, 11) for n in (at + i, 64)]
_widened = permute2("i8x64", _WIDENED)
_widened_next = permute2("i8x64", [n if n == 64 else n + 4 for n in _WIDENED])


@inline
def scales_and_minima(words: Vector) -> Vector:
    """First 16 bytes of four super-blocks -> each one's scales 0..3, minima 0..3, scales 4..7, minima 4..7 as bytes.

    Words: d and dmin; scales 0..3 and, above them, two bits of 4..7; the same of the minima; the other four bits."""
    first = bit_and(words, splat_i32x16(0x3F3F3F3F))
    lows = bit_and(_c_and_c4(words, shifted(words, -4)), splat_i32x16(0x0F0F0F0F))
    # Words 1 and 2 of `second` have scales and minima 4..7.
    second = bit_or(bit_and(shifted(words, -2), splat_i32x16(0x30303030)), lows)
    return _as_bytes(_by_kind(first, second))


@inline
def interleave(q: int, sums: int, n_blocks: int, x: int) -> None:
    """Activations for 64 bytes of nibbles: of each 128 the second and third 32 change places; sums of 32 as int16."""
    for i in range(2 * n_blocks):
        store(x + 128 * i, load_i8x32(q + 128 * i))
        store(x + 128 * i + 32, load_i8x32(q + 128 * i + 64))
        store(x + 128 * i + 64, load_i8x32(q + 128 * i + 32))
        store(x + 128 * i + 96, load_i8x32(q + 128 * i + 96))
    for b in range(n_blocks):
        both = mul_pairs_i16(load_i16x16(sums + 32 * b), splat_i16x16(1))
        store(x + 256 * n_blocks + 16 * b, low_words(both))


@inline
def add_products(isum: Vector, low: Vector, high: Vector, x: int, scales: Vector) -> Vector:
    """isum + scales x (sums of `low` x 64 int8 at x, sums of `high` x the next 64)."""
    zero = splat_i32x16(0)
    packed = pack(dot_unsigned(zero, low, load_i8x64(x)), dot_unsigned(zero, high, load_i8x64(x + 64)))
    return add_pairs(isum, packed, scales)


@inline
def q4_first(isum: Vector, p: int, x: int, scales: Vector) -> Vector:
    """isum of the first 128 weights of a super-block."""
    w = load_i8x64(p + 16)
    return add_products(isum, low4(w), high4(w), x, scales)


@inline
def q4_second(isum: Vector, p: int, x: int, scales: Vector) -> Vector:
    """isum of the other 128."""
    w = load_i8x64(p + 80)
    return add_products(isum, low4(w), high4(w), x + 128, scales)


@inline
def q5_first(isum: Vector, p: int, x: int, scales: Vector) -> Vector:
    """isum of the first 128 weights of a super-block: their fifth bits are bits 0..3 of 32 bytes."""
    w, h, fifth = load_i8x64(p + 48), load_twice(p + 16), splat_i8x64(16)
    low = bit_or(low4(w), bit_and(shifted_halves(h, 4, 2), fifth))
    high = bit_or(high4(w), bit_and(shifted_halves(h, 3, 1), fifth))
    return add_products(isum, low, high, x, scales)


@inline
def q5_second(isum: Vector, p: int, x: int, scales: Vector) -> Vector:
    """isum of the other 128."""
    w, h, fifth = load_i8x64(p + 112), load_twice(p + 16), splat_i8x64(16)
    low = bit_or(low4(w), bit_and(shifted_halves(h, 0, -2), fifth))
    high = bit_or(high4(w), bit_and(shifted_halves(h, -1, -3), fifth))
    return add_products(isum, low, high, x + 128, scales)


def values_with_minima(size: int, first: Inline, second: Inline) -> Inline:
    """Values of a row of Q4_K or Q5_K; `first` and `second` take half a super-block each."""
    lines, ahead = size // 16, matmul_row.AHEAD

    def values_of_row(row: int, x: int, sums: int, n_blocks: int, values: int) -> None:
        for b in range(0, n_blocks, 4):
            start = group_start(b, n_blocks)
            p, y, a = registers(4), registers(4), registers(4)
            for i in unroll(4):
                k = start + min(i, n_blocks - 1)
                p[i] = row + size * k
                y[i] = x + 256 * k
                a[i] = splat_i32x16(0)
            headers = load_words_of_four(p[0], p[1], p[2], p[3])
            parts = scales_and_minima(headers)
            scales = opaque(_as_words(_widened(parts, splat_i8x64(0))))
            minima = opaque(_as_words(_widened_next(parts, splat_i8x64(0))))
            m = add_pairs(splat_i32x16(0), minima, load_pairs(sums + 16 * start))
            far = row + size * b + ahead
            for i in unroll(4):
                for line in unroll(lines * (2 * i + 1) // 8 - lines * 2 * i // 8):
                    prefetch_far(far + 64 * (lines * 2 * i // 8 + line))
                a[i] = first(a[i], p[i], y[i], scales_of_nibbles(scales, 8 * i))
                for line in unroll(lines * (2 * i + 2) // 8 - lines * (2 * i + 1) // 8):
                    prefetch_far(far + 64 * (lines * (2 * i + 1) // 8 + line))
                a[i] = second(a[i], p[i], y[i], scales_of_nibbles(scales, 8 * i + 4))
            both = to_f32x8(join_i32x4(sums_of_four_wide(a[0], a[1], a[2], a[3]), sums_in_each(m)))
            both = mul(both, halves_to_floats(first_of_each(headers)))
            store(values + 4 * start, sub(low_f32x8(both), high_f32x8(both)))

    return inline(values_of_row)


# Q6_K: int8 scales of 16 weights.
@inline
def with_offsets(q: int, sums: int, n_blocks: int, x: int) -> None:
    """Activations for codes stored plus 32: as they are; and -32 times their sums of four, int32."""
    zero = splat_i32x16(0)
    for i in range(4 * n_blocks):
        part = load_i8x64(q + 64 * i)
        store(x + 64 * i, part)
        store(x + 256 * n_blocks + 64 * i, sub(zero, dot_unsigned(zero, splat_i8x64(32), part)))


@inline
def q6_half(isum: Vector, low_bits: int, high_bits: int, x: int, offsets: int, scales: Vector) -> Vector:
    """isum + 128 weights of a super-block."""
    w, h, top = load_i8x64(low_bits), load_twice(high_bits), splat_i8x64(0x30)
    low = bit_or(low4(w), bit_and(shifted_halves(h, 4, 2), top))
    high = bit_or(high4(w), bit_and(shifted_halves(h, 0, -2), top))
    a = dot_unsigned(load_i32x16(offsets), low, load_i8x64(x))
    b = dot_unsigned(load_i32x16(offsets + 64), high, load_i8x64(x + 64))
    return add_pairs(isum, pack(a, b), scales)


def q6_values() -> Inline:
    """Values of a row of Q6_K."""
    lines, ahead = 14, matmul_row.AHEAD

    def values_of_row(row: int, x: int, offsets: int, n_blocks: int, values: int) -> None:
        for b in range(0, n_blocks, 4):
            start = group_start(b, n_blocks)
            far = row + 210 * b + ahead
            p, a = registers(4), registers(4)
            for i in unroll(4):
                k = start + min(i, n_blocks - 1)
                p[i] = row + 210 * k
                y, o = x + 256 * k, offsets + 256 * k
                scales = sign_extend_i8x16(load_i8x16(p[i] + 192))
                for line in unroll(lines * (2 * i + 1) // 8 - lines * 2 * i // 8):
                    prefetch_far(far + 64 * (lines * 2 * i // 8 + line))
                a[i] = q6_half(splat_i32x16(0), p[i], p[i] + 128, y, o, scales_of_sixteens(scales, 0))
                for line in unroll(lines * (2 * i + 2) // 8 - lines * (2 * i + 1) // 8):
                    prefetch_far(far + 64 * (lines * (2 * i + 1) // 8 + line))
                a[i] = q6_half(a[i], p[i] + 64, p[i] + 160, y + 128, o + 128, scales_of_sixteens(scales, 8))
            d = load_f16_of_four(p[0] + 208, p[1] + 208, p[2] + 208, p[3] + 208)
            store(values + 4 * start, mul(to_f32x4(sums_of_four_wide(a[0], a[1], a[2], a[3])), d))

    return inline(values_of_row)


# IQ4_XS: table values plus 128, so products with int8 need int32.
@inline
def by_halves(q: int, sums: int, n_blocks: int, x: int) -> None:
    """Activations for 16 bytes of nibbles a group: of each 128 the even 16s, then the odd; -128 times their sums of
    four, even and odd added, int32."""
    zero = splat_i32x16(0)
    for i in range(2 * n_blocks):
        y = x + 128 * i
        for j in range(4):
            store(y + 16 * j, load_i8x16(q + 128 * i + 32 * j))
            store(y + 64 + 16 * j, load_i8x16(q + 128 * i + 32 * j + 16))
        once = splat_i8x64(64)
        sums_of_eight = dot_unsigned(dot_unsigned(zero, once, load_i8x64(y)), once, load_i8x64(y + 64))
        store(x + 256 * n_blocks + 64 * i, sub(zero, add(sums_of_eight, sums_of_eight)))


iq4_values = lookup("iq4", 64, 128)


@inline
def iq4_half(isum: Vector, p: int, x: int, offsets: int, scales: Vector) -> Vector:
    """isum + 128 weights of a super-block."""
    w = load_i8x64(p)
    dot = dot_unsigned(load_i32x16(offsets), iq4_values(low4(w)), load_i8x64(x))
    return add(isum, mul(dot_unsigned(dot, iq4_values(high4(w)), load_i8x64(x + 64)), scales))


def iq4_xs_values() -> Inline:
    """Values of a row of IQ4_XS."""
    lines, ahead = 9, matmul_row.AHEAD

    def values_of_row(row: int, x: int, offsets: int, n_blocks: int, values: int) -> None:
        for b in range(0, n_blocks, 4):
            start = group_start(b, n_blocks)
            far = row + 136 * b + ahead
            p, a = registers(4), registers(4)
            for i in unroll(4):
                k = start + min(i, n_blocks - 1)
                p[i] = row + 136 * k
                y, o = x + 256 * k, offsets + 128 * k
                scales = load_iq4_scales(p[i] + 2)
                for line in unroll(lines * (2 * i + 1) // 8 - lines * 2 * i // 8):
                    prefetch_far(far + 64 * (lines * 2 * i // 8 + line))
                a[i] = iq4_half(splat_i32x16(0), p[i] + 8, y, o, scales_of_lanes(scales, 0))
                for line in unroll(lines * (2 * i + 2) // 8 - lines * (2 * i + 1) // 8):
                    prefetch_far(far + 64 * (lines * (2 * i + 1) // 8 + line))
                a[i] = iq4_half(a[i], p[i] + 72, y + 128, o + 64, scales_of_lanes(scales, 4))
            d = load_f16_of_four(p[0], p[1], p[2], p[3])
            store(values + 4 * start, mul(to_f32x4(sums_of_four_wide(a[0], a[1], a[2], a[3])), d))

    return inline(values_of_row)


FORMATS = {
    "q4_k": (values_with_minima(144, q4_first, q4_second), interleave),
    "q5_k": (values_with_minima(176, q5_first, q5_second), interleave),
    "q6_k": (q6_values(), with_offsets),
    "iq4_xs": (iq4_xs_values(), by_halves),
}
"""Types with a 512-bit kernel: their values of a row, and how the activations are arranged for it."""


@cache
def row_kernel(name: str) -> Kernel:
    """The one-token kernel of a type in FORMATS."""
    values_of_row, arrange = FORMATS[name]
    return matmul_row.row_kernel(name, 256, values_of_row, arrange)
