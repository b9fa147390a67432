"""Tiles of the K types: LANES rows of one super-block, unpacked with one row per lane (layout in matmul_tile_k.py)."""

from __future__ import annotations

from edgellm.backends.cpu.jit import inline
from edgellm.backends.cpu.matmul_tile_k import D_TILE, DMIN_TILE, OFFSETS, SCALES, VECTOR, WORDS, KFormat
from edgellm.backends.cpu.simd import (
    Vector,
    bit_and,
    bit_or,
    load_f16,
    shift_left,
    shift_right,
    store,
    store_f32,
    sub,
    unroll,
)
from edgellm.backends.cpu.simd_pack import lookup, shifted, transpose_half, transpose_words
from edgellm.backends.cpu.simd_wide import (
    HAS_DOT,
    LANES,
    WIDE_OFFSET,
    ints_as_bytes,
    load_ints,
    low_halves_to_floats,
    shift_right_signed,
    splat_ints,
)


@inline
def word(tile: int, i: int) -> Vector:
    """The i-th raw word of every row."""
    return load_ints(tile + WORDS + i * VECTOR)


@inline
def put_codes(tile: int, k4: int, codes: Vector) -> None:
    """Weights 4 k4 .. 4 k4 + 3 of every row."""
    store(tile + k4 * VECTOR, codes)


@inline
def put_scale(tile: int, group: int, scale: Vector) -> None:
    """A group's scale, in the form the tile kernel multiplies with."""
    if HAS_DOT:
        store(tile + SCALES + group * VECTOR, scale)
    else:
        store(tile + SCALES + group * VECTOR, pair(scale, scale))


@inline
def pair(low: Vector, high: Vector) -> Vector:
    """Two small integers as the int16 halves of one word."""
    return bit_or(bit_and(low, splat_ints(0xFFFF)), shift_left(high, 16))


@inline
def nibbles_low(x: Vector) -> Vector:
    """Low four bits of each byte."""
    return bit_and(x, splat_ints(0x0F0F0F0F))


@inline
def nibbles_high(x: Vector) -> Vector:
    """High four bits of each byte."""
    return bit_and(shift_right(x, 4), splat_ints(0x0F0F0F0F))


@inline
def put_d(source: int, stride: int, target: int) -> None:
    """One float16 of each row, as float32."""
    for r in range(LANES):
        store_f32(target + 4 * r, load_f16(source + r * stride))


@inline
def put_six_bit(tile: int, scales: Vector, minima: Vector, first: int) -> None:
    """Four groups' scales and minima, one byte each."""
    ff = splat_ints(0xFF)
    put_scale(tile, first, bit_and(scales, ff))
    put_scale(tile, first + 1, bit_and(shift_right(scales, 8), ff))
    put_scale(tile, first + 2, bit_and(shift_right(scales, 16), ff))
    put_scale(tile, first + 3, shift_right(scales, 24))
    m0, m1 = bit_and(minima, ff), bit_and(shift_right(minima, 8), ff)
    m2, m3 = bit_and(shift_right(minima, 16), ff), shift_right(minima, 24)
    store(tile + OFFSETS + first * VECTOR, pair(m0, m0))
    store(tile + OFFSETS + (first + 1) * VECTOR, pair(m1, m1))
    store(tile + OFFSETS + (first + 2) * VECTOR, pair(m2, m2))
    store(tile + OFFSETS + (first + 3) * VECTOR, pair(m3, m3))


@inline
def put_header(source: int, stride: int, tile: int) -> None:
    """Q4_K and Q5_K: d, dmin and eight 6-bit scales and minima in 16 bytes."""
    transpose_half(source, stride, tile + WORDS)
    halves, a, b, c = word(tile, 0), word(tile, 1), word(tile, 2), word(tile, 3)
    store(tile + D_TILE, low_halves_to_floats(halves))
    store(tile + DMIN_TILE, low_halves_to_floats(shift_right(halves, 16)))
    six, two = splat_ints(0x3F3F3F3F), splat_ints(0x03030303)
    put_six_bit(tile, bit_and(a, six), bit_and(b, six), 0)
    scales = bit_or(nibbles_low(c), shift_left(bit_and(shift_right(a, 6), two), 4))
    minima = bit_or(nibbles_high(c), shift_left(bit_and(shift_right(b, 6), two), 4))
    put_six_bit(tile, scales, minima, 4)


@inline
def unpack_q4_k(source: int, stride: int, tile: int) -> None:
    """32 bytes hold groups 2j (low nibbles) and 2j + 1 (high)."""
    put_header(source, stride, tile)
    for j in range(4):
        transpose_words(source + 16 + 32 * j, stride, tile + WORDS)
        for i in range(8):
            x = word(tile, i)
            put_codes(tile, 16 * j + i, nibbles_low(x))
            put_codes(tile, 16 * j + 8 + i, nibbles_high(x))


@inline
def put_four(tile: int, s0: Vector, s1: Vector, s2: Vector, s3: Vector, first: int) -> None:
    """Scales of four groups."""
    put_scale(tile, first, s0)
    put_scale(tile, first + 1, s1)
    put_scale(tile, first + 2, s2)
    put_scale(tile, first + 3, s3)


@inline
def put_offsets(tile: int, m0: Vector, m1: Vector, m2: Vector, m3: Vector, first: int) -> None:
    """Offsets of four groups of 16."""
    store(tile + OFFSETS + first // 2 * VECTOR, pair(m0, m1))
    store(tile + OFFSETS + (first // 2 + 1) * VECTOR, pair(m2, m3))


@inline
def put_signed_scales(tile: int, x: Vector, first: int) -> None:
    """Four int8 scales of groups of 16 (a word of each row), which serve as offsets too."""
    s0, s1 = shift_right_signed(shift_left(x, 24), 24), shift_right_signed(shift_left(x, 16), 24)
    s2, s3 = shift_right_signed(shift_left(x, 8), 24), shift_right_signed(x, 24)
    put_four(tile, s0, s1, s2, s3, first)
    put_offsets(tile, s0, s1, s2, s3, first)


@inline
def unpack_q6_k(source: int, stride: int, tile: int) -> None:
    """128 weights: 64 bytes of low nibbles, 32 bytes of high pairs of bits."""
    top = splat_ints(0x30303030)
    for n in range(2):
        transpose_words(source + 64 * n, stride, tile + WORDS)
        transpose_words(source + 64 * n + 32, stride, tile + WORDS + 8 * VECTOR)
        transpose_words(source + 128 + 32 * n, stride, tile + WORDS + 16 * VECTOR)
        for i in range(8):
            a, b, h = word(tile, i), word(tile, 8 + i), word(tile, 16 + i)
            put_codes(tile, 32 * n + i, bit_or(nibbles_low(a), bit_and(shift_left(h, 4), top)))
            put_codes(tile, 32 * n + 8 + i, bit_or(nibbles_low(b), bit_and(shift_left(h, 2), top)))
            put_codes(tile, 32 * n + 16 + i, bit_or(nibbles_high(a), bit_and(h, top)))
            put_codes(tile, 32 * n + 24 + i, bit_or(nibbles_high(b), bit_and(shift_right(h, 2), top)))
    transpose_half(source + 192, stride, tile + WORDS)
    for i in unroll(4):
        put_signed_scales(tile, word(tile, i), 4 * i)
    put_d(source + 208, stride, tile + D_TILE)


@inline
def unpack_q5_k(source: int, stride: int, tile: int) -> None:
    """As Q4_K; bit g of the 32 bytes before the nibbles is the fifth bit in group g."""
    put_header(source, stride, tile)
    transpose_words(source + 16, stride, tile + WORDS + 8 * VECTOR)
    fifth = splat_ints(0x10101010)
    for j in unroll(4):
        transpose_words(source + 48 + 32 * j, stride, tile + WORDS)
        for i in range(8):
            x, h = word(tile, i), word(tile, 8 + i)
            put_codes(tile, 16 * j + i, bit_or(nibbles_low(x), bit_and(shifted(h, 4 - 2 * j), fifth)))
            put_codes(tile, 16 * j + 8 + i, bit_or(nibbles_high(x), bit_and(shifted(h, 3 - 2 * j), fifth)))


@inline
def unpack_q2_k(source: int, stride: int, tile: int) -> None:
    """16 bytes of scale and minimum nibbles; 32 bytes hold four groups of 32 as pairs of bits; d and dmin last."""
    transpose_half(source, stride, tile + WORDS)
    ff, four_bits = splat_ints(0xFF), splat_ints(0x0F)
    for i in unroll(4):
        x = word(tile, i)
        s0, m0 = bit_and(x, four_bits), bit_and(shifted(x, -4), four_bits)
        s1, m1 = bit_and(shifted(x, -8), four_bits), bit_and(shifted(x, -12), four_bits)
        s2, m2 = bit_and(shifted(x, -16), four_bits), bit_and(shifted(x, -20), four_bits)
        s3, m3 = bit_and(shifted(x, -24), four_bits), bit_and(shifted(x, -28), ff)
        put_four(tile, s0, s1, s2, s3, 4 * i)
        put_offsets(tile, m0, m1, m2, m3, 4 * i)
    three = splat_ints(0x03030303)
    for n in range(2):
        transpose_words(source + 16 + 32 * n, stride, tile + WORDS)
        for i in range(8):
            x = word(tile, i)
            for j in unroll(4):
                put_codes(tile, 32 * n + 8 * j + i, bit_and(shifted(x, -2 * j), three))
    transpose_half(source + 68, stride, tile + WORDS)
    store(tile + D_TILE, low_halves_to_floats(word(tile, 3)))
    store(tile + DMIN_TILE, low_halves_to_floats(shift_right(word(tile, 3), 16)))


@inline
def put_minus_32(tile: int, x: Vector, first: int) -> None:
    """Q3_K: four 6-bit scales, one byte each, stored plus 32; they are the offsets too."""
    ff, bias = splat_ints(0xFF), splat_ints(32)
    s0, s1 = sub(bit_and(x, ff), bias), sub(bit_and(shift_right(x, 8), ff), bias)
    s2, s3 = sub(bit_and(shift_right(x, 16), ff), bias), sub(shift_right(x, 24), bias)
    put_four(tile, s0, s1, s2, s3, first)
    put_offsets(tile, s0, s1, s2, s3, first)


@inline
def unpack_q3_k(source: int, stride: int, tile: int) -> None:
    """32 bytes of third bits (bit g: group g of 32), pairs of bits as Q2_K, 12 bytes of scales, d."""
    transpose_half(source + 92, stride, tile + WORDS)
    a, b, c = word(tile, 1), word(tile, 2), word(tile, 3)
    two = splat_ints(0x03030303)
    put_minus_32(tile, bit_or(nibbles_low(a), shift_left(bit_and(c, two), 4)), 0)
    put_minus_32(tile, bit_or(nibbles_low(b), shift_left(bit_and(shift_right(c, 2), two), 4)), 4)
    put_minus_32(tile, bit_or(nibbles_high(a), shift_left(bit_and(shift_right(c, 4), two), 4)), 8)
    put_minus_32(tile, bit_or(nibbles_high(b), shift_left(bit_and(shift_right(c, 6), two), 4)), 12)
    transpose_words(source, stride, tile + WORDS + 8 * VECTOR)
    third = splat_ints(0x04040404)
    for n in unroll(2):
        transpose_words(source + 32 + 32 * n, stride, tile + WORDS)
        for i in range(8):
            x, h = word(tile, i), word(tile, 8 + i)
            for j in unroll(4):
                high = bit_and(shifted(h, 2 - 4 * n - j), third)
                put_codes(tile, 32 * n + 8 * j + i, bit_or(bit_and(shifted(x, -2 * j), two), high))
    put_d(source + 108, stride, tile + D_TILE)


iq4_codes = lookup("iq4", 4 * LANES, WIDE_OFFSET)


@inline
def unpack_iq4_xs(source: int, stride: int, tile: int) -> None:
    """d, 8 x 6-bit scales in two parts, nibbles into the table: 16 bytes a group, low nibbles first."""
    transpose_half(source, stride, tile + WORDS)
    first, low = word(tile, 0), word(tile, 1)
    store(tile + D_TILE, low_halves_to_floats(first))
    for g in unroll(8):
        high = bit_and(shifted(first, -16 - 2 * g), splat_ints(3))
        scale = bit_or(bit_and(shifted(low, -4 * g), splat_ints(15)), shift_left(high, 4))
        scale = sub(scale, splat_ints(32))
        store(tile + SCALES + g * VECTOR, scale)
        store(tile + OFFSETS + g * VECTOR, pair(scale, scale))
    for j in range(4):
        transpose_words(source + 8 + 32 * j, stride, tile + WORDS)
        for i in unroll(4):
            x, y = word(tile, i), word(tile, 4 + i)
            store(tile + (16 * j + i) * VECTOR, iq4_codes(ints_as_bytes(nibbles_low(x))))
            store(tile + (16 * j + 4 + i) * VECTOR, iq4_codes(ints_as_bytes(nibbles_high(x))))
            store(tile + (16 * j + 8 + i) * VECTOR, iq4_codes(ints_as_bytes(nibbles_low(y))))
            store(tile + (16 * j + 12 + i) * VECTOR, iq4_codes(ints_as_bytes(nibbles_high(y))))


Q2_K = KFormat("q2_k", 84, unpack_q2_k, group=16, sums=8)
Q3_K = KFormat("q3_k", 110, unpack_q3_k, group=16, sums=8, offset=4)
Q4_K = KFormat("q4_k", 144, unpack_q4_k, group=32, sums=8)
Q5_K = KFormat("q5_k", 176, unpack_q5_k, group=32, sums=4)
Q6_K = KFormat("q6_k", 210, unpack_q6_k, group=16, sums=2, offset=32)
IQ4_XS = KFormat("iq4_xs", 136, unpack_iq4_xs, group=32, sums=0)
FORMATS = (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS)
