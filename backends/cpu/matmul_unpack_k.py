"""Tiles of the K types: LANES rows of one super-block, unpacked with one row per lane (layout in matmul_tile_k.py)."""

from __future__ import annotations

from edgellm.backends.cpu.jit import inline
from edgellm.backends.cpu.matmul_tile_k import BITS, D_TILE, DMIN_TILE, OFFSETS, SCALES, VECTOR, KFormat
from edgellm.backends.cpu.simd import (
    Vector,
    bit_and,
    bit_or,
    registers,
    shift_left,
    shift_right,
    store,
    sub,
    unroll,
)
from edgellm.backends.cpu.simd_pack import eight_words_of_rows, four_words_of_rows, lookup, shifted, shifted_down
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

Codes = tuple[Vector, ...]
"""64 weights of every row: two times eight vectors, see KFormat."""


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
def put_last_d(end: int, stride: int, tile: int) -> None:
    """The float16 that each row's super-block ends with."""
    words = four_words_of_rows(end - 16, stride)
    store(tile + D_TILE, low_halves_to_floats(shift_right(words[3], 16)))


@inline
def put_bits(source: int, stride: int, tile: int, first: int) -> None:
    """32 bytes of bits that several pieces need."""
    words = eight_words_of_rows(source, stride)
    for i in unroll(8):
        store(tile + BITS + (first + i) * VECTOR, words[i])


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
def six_bit_scales(source: int, stride: int, tile: int) -> None:
    """Q4_K and Q5_K: d, dmin and eight 6-bit scales and minima in 16 bytes."""
    words = four_words_of_rows(source, stride)
    halves, a, b, c = words[0], words[1], words[2], words[3]
    store(tile + D_TILE, low_halves_to_floats(halves))
    store(tile + DMIN_TILE, low_halves_to_floats(shift_right(halves, 16)))
    six, two = splat_ints(0x3F3F3F3F), splat_ints(0x03030303)
    put_six_bit(tile, bit_and(a, six), bit_and(b, six), 0)
    scales = bit_or(nibbles_low(c), shift_left(bit_and(shift_right(a, 6), two), 4))
    minima = bit_or(nibbles_high(c), shift_left(bit_and(shift_right(b, 6), two), 4))
    put_six_bit(tile, scales, minima, 4)


@inline
def q4_k_codes(source: int, stride: int, tile: int, piece: int) -> Codes:
    """32 bytes hold one group in the low nibbles, the next in the high ones."""
    words = eight_words_of_rows(source + 16 + 32 * piece, stride)
    codes = registers(16)
    for i in unroll(8):
        codes[i], codes[8 + i] = ints_as_bytes(nibbles_low(words[i])), ints_as_bytes(nibbles_high(words[i]))
    return tuple(codes)


@inline
def q5_k_scales(source: int, stride: int, tile: int) -> None:
    """As Q4_K; bit g of the 32 bytes after them is the fifth bit in group g."""
    six_bit_scales(source, stride, tile)
    put_bits(source + 16, stride, tile, 0)


@inline
def q5_k_codes(source: int, stride: int, tile: int, piece: int) -> Codes:
    """As Q4_K, with fifth bits."""
    words, fifth = eight_words_of_rows(source + 48 + 32 * piece, stride), splat_ints(0x10101010)
    codes = registers(16)
    for i in unroll(8):
        bits = shifted_down(load_ints(tile + BITS + i * VECTOR), 2 * piece)
        codes[i] = ints_as_bytes(bit_or(nibbles_low(words[i]), bit_and(shift_left(bits, 4), fifth)))
        codes[8 + i] = ints_as_bytes(bit_or(nibbles_high(words[i]), bit_and(shift_left(bits, 3), fifth)))
    return tuple(codes)


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
def q6_k_scales(source: int, stride: int, tile: int) -> None:
    """16 int8 scales, d at the end; before them, for each half, 32 bytes with two high bits of four times 32 codes."""
    words = four_words_of_rows(source + 192, stride)
    for i in unroll(4):
        put_signed_scales(tile, words[i], 4 * i)
    put_last_d(source + 210, stride, tile)
    for half in unroll(2):
        put_bits(source + 128 + 32 * half, stride, tile, 8 * half)


@inline
def q6_k_codes(source: int, stride: int, tile: int, piece: int) -> Codes:
    """32 bytes of nibbles: low ones, and 64 weights further high ones."""
    words, top = eight_words_of_rows(source + 32 * piece, stride), splat_ints(0x30303030)
    codes = registers(16)
    for i in unroll(8):
        bits = shifted_down(load_ints(tile + BITS + (piece // 2 * 8 + i) * VECTOR), piece % 2 * 2)
        codes[i] = ints_as_bytes(bit_or(nibbles_low(words[i]), bit_and(shift_left(bits, 4), top)))
        codes[8 + i] = ints_as_bytes(bit_or(nibbles_high(words[i]), bit_and(bits, top)))
    return tuple(codes)


@inline
def q2_k_scales(source: int, stride: int, tile: int) -> None:
    """16 bytes of scale and minimum nibbles; d and dmin last."""
    words = four_words_of_rows(source, stride)
    ff, four_bits = splat_ints(0xFF), splat_ints(0x0F)
    for i in unroll(4):
        x = words[i]
        s0, m0 = bit_and(x, four_bits), bit_and(shifted(x, -4), four_bits)
        s1, m1 = bit_and(shifted(x, -8), four_bits), bit_and(shifted(x, -12), four_bits)
        s2, m2 = bit_and(shifted(x, -16), four_bits), bit_and(shifted(x, -20), four_bits)
        s3, m3 = bit_and(shifted(x, -24), four_bits), bit_and(shifted(x, -28), ff)
        put_four(tile, s0, s1, s2, s3, 4 * i)
        put_offsets(tile, m0, m1, m2, m3, 4 * i)
    last = four_words_of_rows(source + 68, stride)
    store(tile + D_TILE, low_halves_to_floats(last[3]))
    store(tile + DMIN_TILE, low_halves_to_floats(shift_right(last[3], 16)))


@inline
def q2_k_codes(source: int, stride: int, tile: int, piece: int) -> Codes:
    """32 bytes hold four times 32 weights as pairs of bits."""
    words, three = eight_words_of_rows(source + 16 + piece // 2 * 32, stride), splat_ints(0x03030303)
    codes = registers(16)
    for i in unroll(8):
        pairs = shifted_down(words[i], piece % 2 * 4)
        codes[i], codes[8 + i] = ints_as_bytes(bit_and(pairs, three)), ints_as_bytes(bit_and(shifted(pairs, -2), three))
    return tuple(codes)


@inline
def put_minus_32(tile: int, x: Vector, first: int) -> None:
    """Q3_K: four 6-bit scales, one byte each, stored plus 32; they are the offsets too."""
    ff, bias = splat_ints(0xFF), splat_ints(32)
    s0, s1 = sub(bit_and(x, ff), bias), sub(bit_and(shift_right(x, 8), ff), bias)
    s2, s3 = sub(bit_and(shift_right(x, 16), ff), bias), sub(shift_right(x, 24), bias)
    put_four(tile, s0, s1, s2, s3, first)
    put_offsets(tile, s0, s1, s2, s3, first)


@inline
def q3_k_scales(source: int, stride: int, tile: int) -> None:
    """12 bytes of scales, then d. Bit g of the first 32 bytes is the third bit of the g-th 32 codes."""
    words = four_words_of_rows(source + 92, stride)
    a, b, c = words[1], words[2], words[3]
    two = splat_ints(0x03030303)
    put_minus_32(tile, bit_or(nibbles_low(a), shift_left(bit_and(c, two), 4)), 0)
    put_minus_32(tile, bit_or(nibbles_low(b), shift_left(bit_and(shift_right(c, 2), two), 4)), 4)
    put_minus_32(tile, bit_or(nibbles_high(a), shift_left(bit_and(shift_right(c, 4), two), 4)), 8)
    put_minus_32(tile, bit_or(nibbles_high(b), shift_left(bit_and(shift_right(c, 6), two), 4)), 12)
    put_last_d(source + 110, stride, tile)
    put_bits(source, stride, tile, 0)


@inline
def q3_k_codes(source: int, stride: int, tile: int, piece: int) -> Codes:
    """Pairs of bits as Q2_K, with third bits."""
    words = eight_words_of_rows(source + 32 + piece // 2 * 32, stride)
    two, third = splat_ints(0x03030303), splat_ints(0x04040404)
    codes = registers(16)
    for i in unroll(8):
        pairs = shifted_down(words[i], piece % 2 * 4)
        bits = shifted_down(load_ints(tile + BITS + i * VECTOR), 2 * piece)
        codes[i] = ints_as_bytes(bit_or(bit_and(pairs, two), bit_and(shifted(bits, 2), third)))
        codes[8 + i] = ints_as_bytes(bit_or(bit_and(shifted(pairs, -2), two), bit_and(shifted(bits, 1), third)))
    return tuple(codes)


iq4_codes = lookup("iq4", 4 * LANES, WIDE_OFFSET)


@inline
def iq4_xs_scales(source: int, stride: int, tile: int) -> None:
    """d, then eight 6-bit scales in two parts."""
    words = four_words_of_rows(source, stride)
    first, low = words[0], words[1]
    store(tile + D_TILE, low_halves_to_floats(first))
    for g in unroll(8):
        high = bit_and(shifted(first, -16 - 2 * g), splat_ints(3))
        scale = bit_or(bit_and(shifted(low, -4 * g), splat_ints(15)), shift_left(high, 4))
        scale = sub(scale, splat_ints(32))
        store(tile + SCALES + g * VECTOR, scale)
        store(tile + OFFSETS + g * VECTOR, pair(scale, scale))


@inline
def iq4_xs_codes(source: int, stride: int, tile: int, piece: int) -> Codes:
    """Nibbles into the table: 16 bytes a group, low nibbles first."""
    words = eight_words_of_rows(source + 8 + 32 * piece, stride)
    codes = registers(16)
    for i in unroll(4):
        for group in unroll(2):
            x = words[4 * group + i]
            codes[8 * group + i] = iq4_codes(ints_as_bytes(nibbles_low(x)))
            codes[8 * group + 4 + i] = iq4_codes(ints_as_bytes(nibbles_high(x)))
    return tuple(codes)


Q2_K = KFormat("q2_k", 84, q2_k_scales, q2_k_codes, group=16, sums=8)
Q3_K = KFormat("q3_k", 110, q3_k_scales, q3_k_codes, group=16, sums=8, offset=4)
Q4_K = KFormat("q4_k", 144, six_bit_scales, q4_k_codes, group=32, sums=8)
Q5_K = KFormat("q5_k", 176, q5_k_scales, q5_k_codes, group=32, sums=4)
Q6_K = KFormat("q6_k", 210, q6_k_scales, q6_k_codes, group=16, sums=2, offset=32, apart=16)
IQ4_XS = KFormat("iq4_xs", 136, iq4_xs_scales, iq4_xs_codes, group=32, sums=0)
FORMATS = (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS)
