"""Types with blocks of 32 weights: what a block holds, for the row and the tile kernels.

Per block: codes c (0..31, or signed bytes), scale d, sometimes a minimum m. With activations q, their sum and scale dx:

    isum = sum of c q - offset (sum of q)          exact, int32
    value = d isum                                  or: value = fma(sum of q, m, d isum)
    y = fma(value, dx, y)                           float32, blocks in rising order
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.backends.cpu.jit import Inline, inline
from edgellm.backends.cpu.simd import (
    Op,
    Vector,
    bit_and,
    bit_or,
    bit_xor,
    load_f16,
    load_i8x32,
    load_i32,
    shift_left,
    store,
    store_i32,
    unroll,
)
from edgellm.backends.cpu.simd_dot import (
    LANES,
    WIDE_OFFSET,
    ints_as_bytes,
    load_bits,
    load_e8m0,
    load_e8m0x8_apart,
    load_f16x8_apart,
    load_ints,
    load_nibbles,
    lookup,
    shifted,
    splat_ints,
    transpose_half,
    transpose_words,
)

VECTOR = 4 * LANES
D_TILE, MIN_TILE = 8 * VECTOR, 9 * VECTOR
BLOCK_TILE = 10 * VECTOR
"""One unpacked block: codes [8][LANES][4], then d and m, float32 [LANES]."""
WORDS = 8 * BLOCK_TILE
TILE_BYTES = WORDS + 16 * VECTOR
"""Eight unpacked blocks and room for raw words."""


@dataclass(frozen=True)
class Format32:
    """One type with blocks of 32."""

    name: str
    type_size: int
    codes: Inline
    """(address of a block) -> its 32 codes in order, i8x32."""
    unpack: Inline
    """(block of the first row, bytes between rows, room for words, tile block): codes of LANES rows into the tile."""
    sums: int
    """Products of neighbours (pairs) that add up in int16 without overflow; 0: signed codes."""
    offset: int = 0
    """What codes are stored plus."""
    minimum: bool = False
    """Whether m follows d."""
    load_d: Op = load_f16
    load_d8: Op = load_f16x8_apart


@inline
def codes_4(p: int) -> Vector:
    """Q4_0: nibbles after d."""
    return load_nibbles(p + 2)


@inline
def codes_4m(p: int) -> Vector:
    """Q4_1: nibbles after d and m."""
    return load_nibbles(p + 4)


@inline
def codes_5(p: int) -> Vector:
    """Q5_0: fifth bits, then nibbles."""
    return bit_or(load_nibbles(p + 6), load_bits(p + 2))


@inline
def codes_5m(p: int) -> Vector:
    """Q5_1: as Q5_0 after d and m."""
    return bit_or(load_nibbles(p + 8), load_bits(p + 4))


@inline
def codes_8(p: int) -> Vector:
    """Q8_0: bytes."""
    return load_i8x32(p + 2)


iq4_32, mxfp4_32 = lookup("iq4", 32, 0), lookup("mxfp4", 32, 12)


@inline
def codes_iq4(p: int) -> Vector:
    """IQ4_NL: nibbles into the table."""
    return iq4_32(load_nibbles(p + 2))


@inline
def codes_mxfp4(p: int) -> Vector:
    """MXFP4: nibbles into the doubled E2M1 table, plus 12."""
    return mxfp4_32(load_nibbles(p + 1))


@inline
def put_nibbles(source: int, stride: int, words: int, tile: int) -> None:
    """16 bytes of nibbles of LANES rows: the low ones are weights 0..15."""
    transpose_half(source, stride, words)
    low = splat_ints(0x0F0F0F0F)
    for i in unroll(4):
        x = load_ints(words + i * VECTOR)
        store(tile + i * VECTOR, bit_and(x, low))
        store(tile + (4 + i) * VECTOR, bit_and(shifted(x, -4), low))


@inline
def unpack_4(source: int, stride: int, words: int, tile: int) -> None:
    """Q4_0."""
    put_nibbles(source + 2, stride, words, tile)


@inline
def unpack_4m(source: int, stride: int, words: int, tile: int) -> None:
    """Q4_1."""
    put_nibbles(source + 4, stride, words, tile)


@inline
def put_fifth_bits(source: int, stride: int, tile: int) -> None:
    """Or the fifth bit of each of 32 weights into the codes."""
    for r in range(LANES):
        store_i32(tile + MIN_TILE + 4 * r, load_i32(source + r * stride))
    bits = load_ints(tile + MIN_TILE)
    for i in unroll(8):
        four = bit_and(shifted(bits, -4 * i), splat_ints(15))
        # Bits 0..3 to bit 4 of bytes 0..3: copies 7 places apart, then the one wanted in each byte.
        spread = bit_or(bit_or(four, shift_left(four, 7)), bit_or(shift_left(four, 14), shift_left(four, 21)))
        fifth = shift_left(bit_and(spread, splat_ints(0x01010101)), 4)
        store(tile + i * VECTOR, bit_or(load_ints(tile + i * VECTOR), fifth))


@inline
def unpack_5(source: int, stride: int, words: int, tile: int) -> None:
    """Q5_0."""
    put_nibbles(source + 6, stride, words, tile)
    put_fifth_bits(source + 2, stride, tile)


@inline
def unpack_5m(source: int, stride: int, words: int, tile: int) -> None:
    """Q5_1."""
    put_nibbles(source + 8, stride, words, tile)
    put_fifth_bits(source + 4, stride, tile)


@inline
def unpack_8(source: int, stride: int, words: int, tile: int) -> None:
    """Q8_0: bytes, plus WIDE_OFFSET."""
    transpose_words(source + 2, stride, words)
    for i in unroll(8):
        x = load_ints(words + i * VECTOR)
        store(tile + i * VECTOR, bit_xor(x, splat_ints(0x80808080)) if WIDE_OFFSET else x)


iq4_tile, mxfp4_tile = lookup("iq4", 4 * LANES, WIDE_OFFSET), lookup("mxfp4", 4 * LANES, 12)


@inline
def unpack_iq4(source: int, stride: int, words: int, tile: int) -> None:
    """IQ4_NL."""
    put_nibbles(source + 2, stride, words, tile)
    for i in unroll(8):
        store(tile + i * VECTOR, iq4_tile(ints_as_bytes(load_ints(tile + i * VECTOR))))


@inline
def unpack_mxfp4(source: int, stride: int, words: int, tile: int) -> None:
    """MXFP4."""
    put_nibbles(source + 1, stride, words, tile)
    for i in unroll(8):
        store(tile + i * VECTOR, mxfp4_tile(ints_as_bytes(load_ints(tile + i * VECTOR))))


Q4_0 = Format32("q4_0", 18, codes_4, unpack_4, sums=8, offset=8)
Q4_1 = Format32("q4_1", 20, codes_4m, unpack_4m, sums=8, minimum=True)
Q5_0 = Format32("q5_0", 22, codes_5, unpack_5, sums=4, offset=16)
Q5_1 = Format32("q5_1", 24, codes_5m, unpack_5m, sums=4, minimum=True)
Q8_0 = Format32("q8_0", 34, codes_8, unpack_8, sums=0)
IQ4_NL = Format32("iq4_nl", 18, codes_iq4, unpack_iq4, sums=0)
MXFP4 = Format32("mxfp4", 17, codes_mxfp4, unpack_mxfp4, sums=4, offset=12, load_d=load_e8m0, load_d8=load_e8m0x8_apart)
FORMATS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4)
