"""A block of each quantised type as float32, bit for bit what `backends/dequant.py` says.

Codes of every type, less what they are stored plus, are signed bytes: a function per type makes sixteen at a time and
`put` writes them times their scale. A scale is the product of its parts, then come one multiplication and, in types
with minima, one addition, each rounded (no FMA). Only the block's own bytes are read.
"""

from __future__ import annotations

from typing import Any

from edgellm.backends.cpu import matmul_32
from edgellm.backends.cpu.jit import Inline, inline
from edgellm.backends.cpu.matmul_32 import Format32
from edgellm.backends.cpu.matmul_unpack_k import Q3_K, Q6_K
from edgellm.backends.cpu.simd import (
    Vector,
    add,
    bit_and,
    bit_or,
    float_of_bits,
    float_of_int,
    high_i8x32,
    high_i16x16,
    load_f16,
    load_i8,
    load_i8x16,
    load_i8x32,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    low_i8x32,
    low_i16x16,
    mul,
    sign_extend_i8x16,
    sign_extend_i16x8,
    splat_f32x8,
    splat_i8x16,
    store,
    sub,
    to_f32x8,
    unroll,
)
from edgellm.backends.cpu.simd_pack import i8x16_of, load_nibbles, lookup, shifted

__all__ = ["WRITERS"]

OFFSET_3, OFFSET_6 = Q3_K.offset, Q6_K.offset
iq4_value = lookup("iq4", 32, 0)


@inline
def put(out: int, codes: Vector, scale: Any) -> None:
    """Sixteen codes (i8x16) times a scale."""
    wide, factor = sign_extend_i8x16(codes), splat_f32x8(scale)
    store(out, mul(factor, to_f32x8(sign_extend_i16x8(low_i16x16(wide)))))
    store(out + 32, mul(factor, to_f32x8(sign_extend_i16x8(high_i16x16(wide)))))


@inline
def put_plus(out: int, codes: Vector, scale: Any, minimum: Any) -> None:
    """Sixteen codes times a scale, plus a minimum."""
    wide, factor, least = sign_extend_i8x16(codes), splat_f32x8(scale), splat_f32x8(minimum)
    store(out, add(mul(factor, to_f32x8(sign_extend_i16x8(low_i16x16(wide)))), least))
    store(out + 32, add(mul(factor, to_f32x8(sign_extend_i16x8(high_i16x16(wide)))), least))


@inline
def low_nibbles(x: Vector) -> Vector:
    """Low four bits of each of sixteen bytes."""
    return bit_and(x, splat_i8x16(15))


@inline
def high_nibbles(x: Vector) -> Vector:
    """High four bits of each of sixteen bytes."""
    return bit_and(shifted(x, -4), splat_i8x16(15))


@inline
def bits_to_bytes(bits: int) -> int:
    """Eight bits as 16 or 0 in eight bytes: each half is copied three times 7 places apart, one bit kept of each."""
    return (((bits & 15) | (bits & 240) << 28) * 0x00204081 & 0x0101010101010101) << 4


@inline
def fifth_bits(address: int) -> Vector:
    """Sixteen bits in memory as 16 or 0 in bytes."""
    bits = load_u16(address)
    return i8x16_of(bits_to_bytes(bits & 255), bits_to_bytes(bits >> 8))


@inline
def power_of_two(e: int) -> Any:
    """2^(e - 128) for a byte e; 0 and 1 give subnormal floats."""
    bits = (e - 1) << 23
    if e < 2:
        bits = 0x00200000 << e
    return float_of_bits(bits)


def _block_32(form: Format32) -> Inline:
    at, fifth_at, minimum, exponent = form.at, form.fifth_at, form.minimum, form.exponent
    looked_up, is_bytes = bool(form.table), form.name == "q8_0"
    value, offset = lookup(form.table or "iq4", 32, 0), 0 if form.table else form.offset

    def write(block: int, out: int) -> None:
        codes = load_i8x32(block + at) if is_bytes else load_nibbles(block + at)
        if looked_up:
            codes = value(codes)
        low, high = low_i8x32(codes), high_i8x32(codes)
        if fifth_at:
            low, high = bit_or(low, fifth_bits(block + fifth_at)), bit_or(high, fifth_bits(block + fifth_at + 2))
        if offset:
            low, high = sub(low, splat_i8x16(offset)), sub(high, splat_i8x16(offset))
        scale = power_of_two(load_u8(block)) if exponent else load_f16(block)
        if minimum:
            put_plus(out, low, scale, load_f16(block + 2))
            put_plus(out + 64, high, scale, load_f16(block + 2))
        else:
            put(out, low, scale)
            put(out + 64, high, scale)

    return inline(write)


def _block_4_or_5_k(fifth: bool) -> Inline:
    codes_at = 48 if fifth else 16

    def write(block: int, out: int) -> None:
        """d, dmin, eight 6-bit scales and minima in 12 bytes (Q5_K: bit g of 32 bytes for group g), nibbles."""
        d, dmin = load_f16(block), load_f16(block + 2)
        a, b, c = load_u32(block + 4), load_u32(block + 8), load_u32(block + 12)
        scales = a & 0x3F3F3F3F | (c & 0x0F0F0F0F | a >> 2 & 0x30303030) << 32
        minima = b & 0x3F3F3F3F | (c >> 4 & 0x0F0F0F0F | b >> 2 & 0x30303030) << 32
        for half in range(2):
            if fifth:
                bits = load_i8x16(block + 16 + 16 * half)
            for g in unroll(8):
                codes = load_i8x16(block + codes_at + 32 * (g // 2) + 16 * half)
                codes = high_nibbles(codes) if g % 2 else low_nibbles(codes)
                if fifth:
                    codes = bit_or(codes, bit_and(shifted(bits, 4 - g), splat_i8x16(16)))
                scale = d * float_of_int(scales >> 8 * g & 255)
                minimum = dmin * float_of_int(minima >> 8 * g & 255)
                put_plus(out + 128 * g + 64 * half, codes, scale, -minimum)

    return inline(write)


@inline
def _block_6_k(block: int, out: int) -> None:
    """Per 128 weights 64 bytes of low nibbles, then per 128 32 bytes of high pairs of bits, 16 int8 scales, d."""
    d, offset = load_f16(block + 208), splat_i8x16(OFFSET_6)
    for n in range(2):
        for half in range(2):
            high = load_i8x16(block + 128 + 32 * n + 16 * half)
            for k in unroll(4):
                codes = load_i8x16(block + 64 * n + 32 * (k % 2) + 16 * half)
                codes = high_nibbles(codes) if k >= 2 else low_nibbles(codes)
                codes = bit_or(codes, bit_and(shifted(high, 4 - 2 * k), splat_i8x16(0x30)))
                group = 8 * n + 2 * k + half
                put(out + 64 * group, sub(codes, offset), d * float_of_int(load_i8(block + 192 + group)))


@inline
def _block_2_k(block: int, out: int) -> None:
    """16 bytes of scales (low) and minima (high), 64 bytes of pairs of bits, d, dmin."""
    d, dmin = load_f16(block + 80), load_f16(block + 82)
    for n in range(2):
        for half in range(2):
            pairs = load_i8x16(block + 16 + 32 * n + 16 * half)
            for k in unroll(4):
                group = 8 * n + 2 * k + half
                both = load_u8(block + group)
                codes = bit_and(shifted(pairs, -2 * k), splat_i8x16(3))
                scale, minimum = d * float_of_int(both & 15), dmin * float_of_int(both >> 4)
                put_plus(out + 64 * group, codes, scale, -minimum)


@inline
def _block_3_k(block: int, out: int) -> None:
    """32 bytes of third bits (bit g: group g of 32), 64 bytes of pairs of bits, 12 bytes of 6-bit scales, d."""
    d, offset = load_f16(block + 108), splat_i8x16(OFFSET_3)
    low, high = load_i64(block + 96), load_u32(block + 104)
    top_first = (high & 0x03030303 | (high >> 2 & 0x03030303) << 32) << 4
    top_second = (high >> 4 & 0x03030303 | (high >> 6 & 0x03030303) << 32) << 4
    first, second = low & 0x0F0F0F0F0F0F0F0F | top_first, low >> 4 & 0x0F0F0F0F0F0F0F0F | top_second
    for half in range(2):
        third = load_i8x16(block + 16 * half)
        for g in unroll(8):
            codes = load_i8x16(block + 32 + 32 * (g // 4) + 16 * half)
            codes = bit_and(shifted(codes, -2 * (g % 4)), splat_i8x16(3))
            codes = bit_or(codes, bit_and(shifted(third, 2 - g), splat_i8x16(4)))
            scales = second if g >= 4 else first
            scale = d * float_of_int((scales >> 8 * (2 * (g % 4) + half) & 255) - 32)
            put(out + 128 * g + 64 * half, sub(codes, offset), scale)


@inline
def _block_iq4_xs(block: int, out: int) -> None:
    """d, 8 x 6-bit scales in two parts, nibbles into the table: 16 bytes a group, low nibbles first."""
    d, lows, highs = load_f16(block), load_u32(block + 4), load_u16(block + 2)
    for g in range(8):
        values = iq4_value(load_nibbles(block + 8 + 16 * g))
        scale = d * float_of_int((lows >> 4 * g & 15 | (highs >> 2 * g & 3) << 4) - 32)
        put(out + 128 * g, low_i8x32(values), scale)
        put(out + 128 * g + 64, high_i8x32(values), scale)


WRITERS = {form.name.upper(): _block_32(form) for form in matmul_32.FORMATS} | {
    "Q2_K": _block_2_k,
    "Q3_K": _block_3_k,
    "Q4_K": _block_4_or_5_k(fifth=False),
    "Q5_K": _block_4_or_5_k(fifth=True),
    "Q6_K": _block_6_k,
    "IQ4_XS": _block_iq4_xs,
}
"""By type: `write(block, out)`."""
