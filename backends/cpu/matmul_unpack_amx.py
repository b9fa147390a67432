"""How K types go into AMX tiles: codes and headers as the products take them, activations to match, sums of a row.

Codes stay in the order in which a super-block has them; the activations are arranged to match, once a call. A group is
16 or 32 weights with one scale. See matmul_amx.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.backends.cpu.jit import Inline, inline
from edgellm.backends.cpu.matmul_row_512 import high4, low4, q6_codes, scales_and_minima
from edgellm.backends.cpu.simd import (
    Vector,
    add,
    bit_and,
    fma,
    load_i8x16,
    load_i8x64,
    load_i16x16,
    load_i32,
    load_i32x16,
    mul,
    mul_pairs_i16,
    narrow_i32x8,
    permute,
    permute2,
    registers,
    reinterpret,
    shift_right,
    splat_i8x64,
    splat_i16x16,
    splat_i32x8,
    splat_i32x16,
    store,
    store_i32,
    sub,
    unroll,
)
from edgellm.backends.cpu.simd_512 import (
    floats_of_four,
    load_words_of_four,
    part_of_floats,
    sums_of_lanes,
)
from edgellm.backends.cpu.simd_amx import (
    load_four_in_all,
    load_pair_in_all,
    load_pair_in_half,
    words_of_bytes,
)
from edgellm.backends.cpu.simd_pack import load_f16_of_four, transposed_8x8
from edgellm.backends.cpu.simd_wide import ints_to_floats

__all__ = ["FORMATS", "FewFormat", "arranged", "as_floats", "evens", "evens_of_four", "four_each", "odds"]
__all__ += ["odds_of_four", "sums_arranged", "twice_each"]


@dataclass(frozen=True)
class FewFormat:
    """How a type goes into tiles."""

    name: str
    size: int
    """Bytes of a super-block."""
    depth: int
    """Codes of a row in one product: as many groups as a token has lanes."""
    width: int
    """Lanes of a product: 8 or 16."""
    lanes: int
    """Lanes of a token, one for each group of a product."""
    minima: bool
    """Whether there are minima; the last product is theirs with the sums of 32 activations."""
    unpack: Inline
    """(super-block, target): its 256 codes, signed."""
    headers: Inline
    """(four super-blocks, addresses for their scales, minima, d): unpacks those; dmin goes 64 bytes behind d."""
    total: Inline
    """(products of `rows` rows, their scales) -> isum, float32: [token][row]."""

    @property
    def tokens(self) -> int:
        """Tokens at once."""
        return self.width // self.lanes

    @property
    def rows(self) -> int:
        """Rows of one vector of 16 lanes, once a token's lanes are added up."""
        return 16 // self.tokens


twice_each = permute("f32x8", [i // 2 for i in range(16)])
four_each = permute("f32x4", [i // 4 for i in range(16)])
_EVENS, _ODDS = ([n for i in range(first, 16, 2) for n in (i, 16 + i)] for first in (0, 1))
evens, odds = permute2("i32x16", _EVENS), permute2("i32x16", _ODDS)
evens_f, odds_f = permute2("f32x16", _EVENS), permute2("f32x16", _ODDS)
_EVENS_OF_FOUR, _ODDS_OF_FOUR = (
    [n + 2 * t for t in range(4) for n in (first, 8 + first, 16 + first, 24 + first)] for first in (0, 1)
)
evens_of_four, odds_of_four = permute2("i32x16", _EVENS_OF_FOUR), permute2("i32x16", _ODDS_OF_FOUR)
evens_of_four_f, odds_of_four_f = permute2("f32x16", _EVENS_OF_FOUR), permute2("f32x16", _ODDS_OF_FOUR)
as_floats, as_words = reinterpret("i32x16", "f32x16"), reinterpret("i8x64", "i32x16")


_in_even = permute2("i32x8", [n for i in range(8) for n in (i, 8)])
_in_odd = permute2("i32x8", [n for i in range(8) for n in (8, i)])


@inline
def arrange_16_for_eight(q: int, x: int) -> None:
    """As `arranged`, for eight tokens and groups of 16."""
    c = registers(8)
    zero = splat_i32x8(0)
    for i in range(8):
        c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7] = transposed_8x8(q + 32 * i, 256)
        for j in unroll(4):
            store(x + 512 * i + 64 * j, _in_even(c[j], zero))
            store(x + 512 * i + 256 + 64 * j, _in_odd(c[j + 4], zero))


@inline
def arrange_32_for_eight(q: int, x: int) -> None:
    """As `arranged`, for eight tokens and groups of 32."""
    c = registers(8)
    zero = splat_i32x8(0)
    for i in range(4):
        first = q + 32 * (i // 2 * 4 + i % 2)
        c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7] = transposed_8x8(first, 256)
        for j in unroll(8):
            store(x + 1024 * i + 64 * j, _in_even(c[j], zero))
        c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7] = transposed_8x8(first + 64, 256)
        for j in unroll(8):
            store(x + 1024 * i + 512 + 64 * j, _in_odd(c[j], zero))


def arranged(width: int, lanes: int, nibbles: bool) -> Inline:
    """(q of a super-block, token after token; target): words of four activations, in a product's rows of `width` lanes.
    Groups of 32 in the order of nibbles (0 and 2, 1 and 3 ... are together), or groups of 16 as they come."""
    tokens, words = width // lanes, 8 if nibbles else 4
    if tokens == 8:  # three times as fast
        return arrange_32_for_eight if nibbles else arrange_16_for_eight

    def arrange(q: int, x: int) -> None:
        for at in range(0, 256 * width, 64):
            store(x + at, splat_i32x16(0))
        for g in range(64 // words):
            if nibbles:
                product, lane = g // 4 * 2 + g % 2, g % 4 // 2
            else:
                product, lane = g // lanes, g % lanes
            at = x + 4 * width * words * (lanes * product + lane) + 4 * lane
            for t in range(tokens):
                for i in unroll(words):
                    word = load_i32(q + 256 * t + 4 * (words * g + i))
                    store_i32(at + 4 * width * i + 4 * lanes * t, word)

    return inline(arrange)


def sums_arranged(width: int) -> Inline:
    """(sums of 16 of a super-block, token after token; target): the sums of 32 for a product with `scales_and_minima`,
    their 7 low bits in even lanes, the rest in odd ones. The 64 bytes behind them are written as well."""
    spare_at, tokens = 16 * width, width // 2

    def arrange_sums(sums: int, x: int) -> None:
        for at in range(0, spare_at, 64):
            store(x + at, splat_i32x16(0))
        for t in range(tokens):
            total = mul_pairs_i16(load_i16x16(sums + 32 * t), splat_i16x16(1))
            low, high = bit_and(total, splat_i32x8(127)), shift_right(total, 7)
            store(x + spare_at, narrow_i32x8(low, high, low, high))
            for i in unroll(2):
                at = x + 8 * t + 4 * i
                store_i32(at + 4 * width, load_i32(x + spare_at + 8 * i))
                store_i32(at + 12 * width, load_i32(x + spare_at + 8 * i + 4))

    return inline(arrange_sums)


@inline
def unpack_q4(p: int, target: int) -> None:
    """Q4_K: 64 bytes hold groups 0 (low nibbles), 2, then 1, 3 (high ones)."""
    for i in unroll(2):
        w = load_i8x64(p + 16 + 64 * i)
        store(target + 128 * i, low4(w))
        store(target + 128 * i + 64, high4(w))


_ORDER = [0, 2, 1, 3, 8, 10, 9, 11]
_scales_of_two, _scales_of_others = (
    permute2("i8x64", [n for r in (row, row + 1) for i in _ORDER for n in (16 * r + i, 64, 64, 64)]) for row in (0, 2)
)
first_half, second_half = permute("f32x16", list(range(8))), permute("f32x16", list(range(8, 16)))


@inline
def headers_with_minima(p0: int, p1: int, p2: int, p3: int, scales: int, minima: int, d: int) -> None:
    """Q4_K: scales in the order of `arrange_32`, as floats."""
    headers = load_words_of_four(p0, p1, p2, p3)
    parts, zero = scales_and_minima(headers), splat_i8x64(0)
    store(minima, parts)
    two, others = as_words(_scales_of_two(parts, zero)), as_words(_scales_of_others(parts, zero))
    two, others = ints_to_floats(two), ints_to_floats(others)
    store(scales, first_half(two))
    store(scales + 64, second_half(two))
    store(scales + 128, first_half(others))
    store(scales + 192, second_half(others))
    store(d, part_of_floats(floats_of_four(headers, 0), 0))
    store(d + 64, part_of_floats(floats_of_four(headers, 1), 0))


@inline
def row_total_32(products: int, scales: int) -> Vector:
    """Per lane the sum of four groups times their scales: 4 x 63 x (32 x 15 x 127) < 2^24, so exact in float32."""
    total = mul(ints_to_floats(load_i32x16(products)), as_floats(load_pair_in_all(scales)))
    for i in unroll(3):
        scale = as_floats(load_pair_in_all(scales + 8 * (i + 1)))
        total = fma(ints_to_floats(load_i32x16(products + 1024 * (i + 1))), scale, total)
    return total


@inline
def total_32(products: int, scales: int) -> Vector:
    """Two rows of Q4_K. Both summands are exact, so their sum is rounded as that of integers would be."""
    a, b = row_total_32(products, scales), row_total_32(products + 64, scales + 64)
    return add(evens_f(a, b), odds_f(a, b))


@inline
def two_rows_total_32(products: int, scales: int) -> Vector:
    """`row_total_32` of two rows in eight lanes each."""
    total = mul(ints_to_floats(load_i32x16(products)), as_floats(load_pair_in_half(scales, scales + 64)))
    for i in unroll(3):
        scale = as_floats(load_pair_in_half(scales + 8 * (i + 1), scales + 64 + 8 * (i + 1)))
        total = fma(ints_to_floats(load_i32x16(products + 512 * (i + 1))), scale, total)
    return total


@inline
def total_32_by_four(products: int, scales: int) -> Vector:
    """Four rows of Q4_K for four tokens."""
    a, b = two_rows_total_32(products, scales), two_rows_total_32(products + 64, scales + 128)
    return add(evens_of_four_f(a, b), odds_of_four_f(a, b))


@inline
def unpack_q6(p: int, target: int) -> None:
    """Q6_K: codes are stored plus 32."""
    for half in unroll(2):
        low, high = q6_codes(p, half)
        store(target + 128 * half, sub(low, splat_i8x64(32)))
        store(target + 128 * half + 64, sub(high, splat_i8x64(32)))


@inline
def headers_q6(p0: int, p1: int, p2: int, p3: int, scales: int, minima: int, d: int) -> None:
    """Q6_K: int8 scales of 16."""
    store(scales, words_of_bytes(load_i8x16(p0 + 192)))
    store(scales + 64, words_of_bytes(load_i8x16(p1 + 192)))
    store(scales + 128, words_of_bytes(load_i8x16(p2 + 192)))
    store(scales + 192, words_of_bytes(load_i8x16(p3 + 192)))
    store(d, load_f16_of_four(p0 + 208, p1 + 208, p2 + 208, p3 + 208))


@inline
def row_total_16(products: int, scales: int) -> Vector:
    """Per lane the sum of eight groups times their scales."""
    total = mul(load_i32x16(products), load_pair_in_all(scales))
    for i in unroll(7):
        total = add(total, mul(load_i32x16(products + 1024 * (i + 1)), load_pair_in_all(scales + 8 * (i + 1))))
    return total


@inline
def row_total_16_by_four(products: int, scales: int) -> Vector:
    """The same with four groups in a product."""
    total = mul(load_i32x16(products), load_four_in_all(scales))
    for i in unroll(3):
        total = add(total, mul(load_i32x16(products + 1024 * (i + 1)), load_four_in_all(scales + 16 * (i + 1))))
    return total


@inline
def total_16_by_four(products: int, scales: int) -> Vector:
    """Four rows of Q6_K."""
    t = registers(4)
    for i in unroll(4):
        t[i] = row_total_16_by_four(products + 64 * i, scales + 64 * i)
    return ints_to_floats(sums_of_lanes(t[0], t[1], t[2], t[3]))


@inline
def total_16(products: int, scales: int) -> Vector:
    """Two rows of Q6_K."""
    a, b = row_total_16(products, scales), row_total_16(products + 64, scales + 64)
    return ints_to_floats(add(evens(a, b), odds(a, b)))


FORMATS = {
    (form.name, form.tokens): form
    for form in (
        FewFormat("q4_k", 144, 64, 8, 2, True, unpack_q4, headers_with_minima, total_32_by_four),
        FewFormat("q4_k", 144, 64, 16, 2, True, unpack_q4, headers_with_minima, total_32),
        FewFormat("q6_k", 210, 32, 16, 2, False, unpack_q6, headers_q6, total_16),
        FewFormat("q6_k", 210, 64, 16, 4, False, unpack_q6, headers_q6, total_16_by_four),
    )
}
"""By name and the most tokens."""
