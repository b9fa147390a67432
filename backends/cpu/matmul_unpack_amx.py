"""How K types go into AMX tiles: codes and headers as the products take them, activations to match, sums of a row.

Codes stay in the order in which a super-block has them; the activations are arranged to it, once a call. A group is 16
or 32 weights with one scale. See matmul_amx.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.backends.cpu.jit import Inline, inline
from edgellm.backends.cpu.matmul_row_512 import high4, low4, q6_codes, scales_and_minima
from edgellm.backends.cpu.simd import (
    Vector,
    add,
    bit_and,
    bit_or,
    fma,
    load_i8x16,
    load_i8x64,
    load_i16x16,
    load_i32x4,
    load_i32x8,
    load_i32x16,
    mul,
    mul_pairs_i16,
    permute,
    permute2,
    registers,
    reinterpret,
    shift_left,
    shift_right,
    splat_i8x64,
    splat_i16x16,
    splat_i32x4,
    splat_i32x8,
    store,
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
    words_of_bytes,
)
from edgellm.backends.cpu.simd_pack import load_f16_of_four
from edgellm.backends.cpu.simd_wide import ints_to_floats

__all__ = ["FORMATS", "FewFormat", "arrange_sums", "as_floats", "evens", "four_each", "odds", "twice_each"]


@dataclass(frozen=True)
class FewFormat:
    """How a type goes into tiles."""

    name: str
    size: int
    """Bytes of a super-block."""
    depth: int
    """Codes of a row in one product: as many groups as a token has lanes."""
    lanes: int
    """Lanes of a token, of 16."""
    minima: bool
    """Whether there are minima; the last product is theirs with the sums of 32 activations."""
    arrange: Inline
    """(activations of a super-block, target): as the products take them."""
    unpack: Inline
    """(super-block, target): its 256 codes, signed."""
    headers: Inline
    """(four super-blocks, addresses for their scales, minima, d): unpacks those; dmin goes 64 bytes behind d."""
    total: Inline
    """(products of `lanes` rows, their scales) -> isum, float32, a token's lanes being rows."""

    @property
    def tokens(self) -> int:
        """Tokens at once."""
        return 16 // self.lanes


_even = permute2("i32x8", [n for i in range(8) for n in (i, 8)])
_odd = permute2("i32x8", [n for i in range(8) for n in (8, i)])
_both = permute2("i32x8", [n for i in range(8) for n in (i, 8 + i)])
_in_fourth = [permute2("i32x4", [n // 4 if n % 4 == j else 4 for n in range(16)]) for j in range(4)]
_in_first, _in_second, _in_third, _in_last = _in_fourth
twice_each = permute("f32x8", [i // 2 for i in range(16)])
four_each = permute("f32x4", [i // 4 for i in range(16)])
_EVENS, _ODDS = ([n for i in range(first, 16, 2) for n in (i, 16 + i)] for first in (0, 1))
evens, odds = permute2("i32x16", _EVENS), permute2("i32x16", _ODDS)
evens_f, odds_f = permute2("f32x16", _EVENS), permute2("f32x16", _ODDS)
as_floats, as_words = reinterpret("i32x16", "f32x16"), reinterpret("i8x64", "i32x16")


@inline
def arrange_32(q: int, x: int) -> None:
    """Groups of 32 in the order of nibbles: 0 and 2, 1 and 3, 4 and 6, 5 and 7."""
    zero = splat_i32x8(0)
    for i in unroll(4):
        for j in range(8):
            first, second = q + 32 * (8 * (4 * (i // 2) + i % 2) + j), q + 32 * (8 * (4 * (i // 2) + i % 2 + 2) + j)
            store(x + 1024 * i + 64 * j, _even(load_i32x8(first), zero))
            store(x + 1024 * i + 512 + 64 * j, _odd(load_i32x8(second), zero))


@inline
def arrange_16(q: int, x: int) -> None:
    """Groups of 16 in order: 0 and 1, 2 and 3 ..."""
    zero = splat_i32x8(0)
    for i in range(8):
        for j in unroll(4):
            store(x + 512 * i + 64 * j, _even(load_i32x8(q + 256 * i + 32 * j), zero))
            store(x + 512 * i + 256 + 64 * j, _odd(load_i32x8(q + 256 * i + 128 + 32 * j), zero))


@inline
def arrange_16_by_four(q: int, x: int) -> None:
    """Four groups of 16 in a product, for four tokens."""
    zero = splat_i32x4(0)
    for i in range(4):
        for j in unroll(4):
            at, p = x + 1024 * i + 64 * j, q + 256 * i + 16 * j
            store(at, _in_first(load_i32x4(p), zero))
            store(at + 256, _in_second(load_i32x4(p + 64), zero))
            store(at + 512, _in_third(load_i32x4(p + 128), zero))
            store(at + 768, _in_last(load_i32x4(p + 192), zero))


@inline
def arrange_sums(sums: int, x: int) -> None:
    """Sums of 32 activations for a product with `scales_and_minima`: 7 low bits in even lanes, the rest in odd ones."""
    zero = splat_i32x8(0)
    for half in unroll(2):
        low, high = zero, zero
        for i in unroll(4):
            total = mul_pairs_i16(load_i16x16(sums + 32 * (4 * half + i)), splat_i16x16(1))
            low = bit_or(low, shift_left(bit_and(total, splat_i32x8(127)), 8 * i))
            high = bit_or(high, shift_left(bit_and(shift_right(total, 7), splat_i32x8(255)), 8 * i))
        store(x + 128 * half, _both(zero, zero))
        store(x + 128 * half + 64, _both(low, high))


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
        FewFormat("q4_k", 144, 64, 2, True, arrange_32, unpack_q4, headers_with_minima, total_32),
        FewFormat("q6_k", 210, 32, 2, False, arrange_16, unpack_q6, headers_q6, total_16),
        FewFormat("q6_k", 210, 64, 4, False, arrange_16_by_four, unpack_q6, headers_q6, total_16_by_four),
    )
}
"""By name and the most tokens."""
