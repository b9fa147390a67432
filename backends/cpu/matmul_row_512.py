"""K-type weights times up to four tokens in 512-bit vectors, four super-blocks at a time (AVX-512 with VNNI).

The same integers as in matmul_row_k.py from fewer instructions. A vector holds 64 codes; `vpdpbusd` adds products of
four; two such results are packed into int16 (4 x 63 x 127 fits), and one `vpdpwssd` multiplies them by their scales.
Scales of four super-blocks are unpacked together. The activations are arranged once a call, so that they lie as codes
come out of a vector; what codes are stored plus is taken off where the products start. A row's codes serve all tokens
while they are in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from edgellm.backends.cpu import matmul_row
from edgellm.backends.cpu.jit import Inline, Kernel, inline
from edgellm.backends.cpu.matmul_row import values_bytes
from edgellm.backends.cpu.simd import (
    Op,
    Vector,
    add,
    bit_and,
    bit_or,
    load_i8x16,
    load_i8x64,
    load_i16x16,
    load_i32x8,
    mul,
    mul_pairs_i16,
    permute2,
    registers,
    reinterpret,
    shift_left,
    splat_i8x64,
    splat_i16x16,
    splat_i32x8,
    splat_i32x16,
    store,
    sub,
    unroll,
)
from edgellm.backends.cpu.simd_512 import (
    add_scaled,
    floats_of_four,
    four_times,
    in_each,
    lanes_to_parts,
    load_four_times,
    load_iq4_scales,
    load_scales_twice,
    load_twice,
    load_words_of_four,
    low_words,
    opaque,
    pack,
    part_of_floats,
    prefetch_share,
    rotated_parts,
    scales_in_order,
    scales_of_lanes,
    scales_of_sixteens,
    shifted_halves,
    sums_of_lanes,
    sums_of_parts,
)
from edgellm.backends.cpu.simd_dot import add_pairs, dot_unsigned
from edgellm.backends.cpu.simd_pack import load_f16_of_four, lookup, shifted
from edgellm.backends.cpu.simd_wide import ints_to_floats, load_pairs

__all__ = ["FORMATS", "row_kernel"]

Arrange = Callable[[int], Inline]
"""Number of tokens -> `arrange` of matmul_row.row_kernel: codes block by block, all tokens of a block together."""


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
    value). A row of fewer has room for four."""
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


def by_sixteens(tokens: int) -> Inline:
    """Activations of a super-block as the four vectors of its codes come: of each 64 the first 16, then the second, ...
    Sums of 32 as int16, token after token."""

    def arrange(q: int, sums: int, n_blocks: int, x: int, token: int) -> None:
        for b in range(n_blocks):
            source, y = q + 256 * b, x + 256 * (b * tokens + token)
            for i in unroll(16):
                store(y + 64 * (i % 4) + 16 * (i // 4), load_i8x16(source + 16 * i))
            both = mul_pairs_i16(load_i16x16(sums + 32 * b), splat_i16x16(1))
            store(x + 256 * tokens * n_blocks + 16 * (token * n_blocks + b), low_words(both))

    return inline(arrange)


_even_parts = permute2("i8x64", [16 * n + i for n in (0, 2, 4, 6) for i in range(16)])
_odd_parts = permute2("i8x64", [16 * n + i for n in (1, 3, 5, 7) for i in range(16)])


@inline
def nibbles(p: int) -> tuple[Vector, Vector, Vector, Vector]:
    """128 bytes of nibbles, 32 for two groups -> 16 codes each of groups 0, 2, 4, 6, the other 16; so of 1, 3, 5, 7."""
    a, b = load_i8x64(p), load_i8x64(p + 64)
    first, second = _even_parts(a, b), _odd_parts(a, b)
    return low4(first), low4(second), high4(first), high4(second)


@inline
def q4_codes(p: int) -> tuple[Vector, Vector, Vector, Vector]:
    """Codes of a super-block as `nibbles` has them."""
    return nibbles(p + 16)


@inline
def q5_codes(p: int) -> tuple[Vector, Vector, Vector, Vector]:
    """The same; bit g of 32 bytes is the fifth bit of group g's codes."""
    a, b, c, d = nibbles(p + 48)
    first, second, fifth = load_four_times(p + 16), load_four_times(p + 32), splat_i8x64(16)
    a = bit_or(a, bit_and(rotated_parts(first, 4, -2), fifth))
    b = bit_or(b, bit_and(rotated_parts(second, 4, -2), fifth))
    c = bit_or(c, bit_and(rotated_parts(first, 3, -2), fifth))
    d = bit_or(d, bit_and(rotated_parts(second, 3, -2), fifth))
    return a, b, c, d


def values_with_minima(size: int, codes: Inline, tokens: int) -> Inline:
    """Values of a row of Q4_K or Q5_K (`size` bytes a super-block). Sums of eight products fit int16 (8 x 31 x 127)."""
    lines, ahead = -(-size // 16), matmul_row.AHEAD
    places = 8 if lines <= 9 else 16  # per group, for requests ahead; which is better was measured

    def values_of_row(row: int, x: int, sums: int, n_blocks: int, values: int) -> None:
        zero = splat_i32x16(0)
        for block in range(0, n_blocks, 4):
            start, far = group_start(block, n_blocks), row + size * block + ahead
            p, isum, msum = registers(4), registers(4 * tokens), registers(tokens)
            for i in unroll(4):
                p[i] = row + size * (start + i)
            headers = load_words_of_four(p[0], p[1], p[2], p[3])
            parts = scales_and_minima(headers)
            scales = opaque(_as_words(_widened(parts, splat_i8x64(0))))
            minima = opaque(_as_words(_widened_next(parts, splat_i8x64(0))))
            for i in unroll(4):
                y = x + 256 * tokens * (start + i)
                prefetch_share(far, lines, places // 4 * i, places)
                a, b, c, d = codes(p[i])
                prefetch_share(far, lines, places // 4 * i + 1, places)
                scale = scales_in_order(scales, 8 * i)
                for t in unroll(tokens):
                    z = y + 256 * t
                    low = dot_unsigned(dot_unsigned(zero, a, load_i8x64(z)), b, load_i8x64(z + 64))
                    if places == 16 and t == 0:
                        prefetch_share(far, lines, 4 * i + 2, places)
                    high = dot_unsigned(dot_unsigned(zero, c, load_i8x64(z + 128)), d, load_i8x64(z + 192))
                    isum[4 * t + i] = add_scaled(zero, pack(low, high), scale)
                if places == 16:
                    prefetch_share(far, lines, 4 * i + 3, places)
            for t in unroll(tokens):
                isum[t] = sums_of_lanes(isum[4 * t], isum[4 * t + 1], isum[4 * t + 2], isum[4 * t + 3])
                msum[t] = add_pairs(zero, minima, load_pairs(sums + 16 * (t * n_blocks + start)))
            whole = sums_of_parts(isum[0], isum[1 % tokens], isum[2 % tokens], isum[3 % tokens])
            least = lanes_to_parts(sums_of_lanes(msum[0], msum[1 % tokens], msum[2 % tokens], msum[3 % tokens]))
            whole = mul(ints_to_floats(whole), floats_of_four(headers, 0))
            whole = sub(whole, mul(ints_to_floats(least), floats_of_four(headers, 1)))
            for t in unroll(tokens):
                store(values + t * values_bytes(n_blocks) + 4 * start, part_of_floats(whole, t))

    return inline(values_of_row)


@dataclass(frozen=True)
class Shifted:
    """A type without minima: what its codes are stored plus is taken off by sums of the activations."""

    size: int
    """Bytes of a super-block."""
    d_at: int
    """Where its d lies."""
    codes: Inline
    """(super-block, half: 0 or 1) -> 64 codes, and the 64 whose activations follow theirs."""
    load_scales: Inline
    """Super-block -> its scales."""
    start: Inline
    """(scales, address of a token's sums) -> what isum starts with."""
    scales_of: Op
    """(scales, number of the first) -> the scales of half a super-block as `add_half` takes them."""
    add_half: Inline
    """(isum, first codes, second codes, x, scales) -> isum with half a super-block more."""
    step: int
    """Scales in half a super-block."""
    sums_bytes: int
    """Bytes of sums of a super-block."""


def values_shifted(form: Shifted, tokens: int) -> Inline:
    """Values of a row of Q6_K or IQ4_XS."""
    size, d_at, step, sums_bytes, codes = form.size, form.d_at, form.step, form.sums_bytes, form.codes
    load_scales, start_of, scales_of, add_half = form.load_scales, form.start, form.scales_of, form.add_half
    lines, ahead = -(-size // 16), matmul_row.AHEAD

    def values_of_row(row: int, x: int, sums: int, n_blocks: int, values: int) -> None:
        for block in range(0, n_blocks, 4):
            start, far = group_start(block, n_blocks), row + size * block + ahead
            p, isum = registers(4), registers(4 * tokens)
            for i in unroll(4):
                # Written so that LLVM adds constants to one address: 2% faster than size * (start + i).
                p[i] = row + size * start + size * i
                y, s = x + 256 * tokens * start + 256 * tokens * i, sums + sums_bytes * tokens * (start + i)
                scales = load_scales(p[i])
                prefetch_share(far, lines, 4 * i, 16)
                a, b = codes(p[i], 0)
                prefetch_share(far, lines, 4 * i + 1, 16)
                scale = scales_of(scales, 0)
                for t in unroll(tokens):
                    isum[4 * t + i] = add_half(start_of(scales, s + sums_bytes * t), a, b, y + 256 * t, scale)
                prefetch_share(far, lines, 4 * i + 2, 16)
                a, b = codes(p[i], 1)
                prefetch_share(far, lines, 4 * i + 3, 16)
                scale = scales_of(scales, step)
                for t in unroll(tokens):
                    isum[4 * t + i] = add_half(isum[4 * t + i], a, b, y + 256 * t + 128, scale)
            for t in unroll(tokens):
                isum[t] = sums_of_lanes(isum[4 * t], isum[4 * t + 1], isum[4 * t + 2], isum[4 * t + 3])
            whole = sums_of_parts(isum[0], isum[1 % tokens], isum[2 % tokens], isum[3 % tokens])
            d = four_times(load_f16_of_four(p[0] + d_at, p[1] + d_at, p[2] + d_at, p[3] + d_at))
            whole = mul(ints_to_floats(whole), d)
            for t in unroll(tokens):
                store(values + t * values_bytes(n_blocks) + 4 * start, part_of_floats(whole, t))

    return inline(values_of_row)


# Q6_K: int8 scales of 16 weights, codes stored plus 32.
def with_sixteens(tokens: int) -> Inline:
    """Activations as they are; -16 times their sums of 16 as int16 (-32 times would not fit), twice."""

    def arrange(q: int, sums: int, n_blocks: int, x: int, token: int) -> None:
        for b in range(n_blocks):
            place = b * tokens + token
            for i in unroll(4):
                store(x + 256 * place + 64 * i, load_i8x64(q + 256 * b + 64 * i))
            minus = sub(splat_i16x16(0), shift_left(load_i16x16(sums + 32 * b), 4))
            store(x + 256 * tokens * n_blocks + 64 * place, minus)
            store(x + 256 * tokens * n_blocks + 64 * place + 32, minus)

    return inline(arrange)


@inline
def q6_codes(p: int, half: int) -> tuple[Vector, Vector]:
    """Codes of 128 weights: 64 bytes of nibbles, and 32 bytes with two bits each for four of them."""
    w, h, top = load_i8x64(p + 64 * half), load_twice(p + 128 + 32 * half), splat_i8x64(0x30)
    low = bit_or(low4(w), bit_and(shifted_halves(h, 4, 2), top))
    return low, bit_or(high4(w), bit_and(shifted_halves(h, 0, -2), top))


@inline
def q6_scales(p: int) -> Vector:
    """16 scales as int16, twice."""
    return opaque(load_scales_twice(p + 192))


@inline
def q6_start(scales: Vector, sums: int) -> Vector:
    """-32 times the sums of 16 times their scales."""
    return add_pairs(splat_i32x16(0), scales, load_pairs(sums))


@inline
def add_q6(isum: Vector, low: Vector, high: Vector, x: int, scales: Vector) -> Vector:
    """isum + 128 weights of a super-block."""
    zero = splat_i32x16(0)
    packed = pack(dot_unsigned(zero, low, load_i8x64(x)), dot_unsigned(zero, high, load_i8x64(x + 64)))
    return add_scaled(isum, packed, scales)


# IQ4_XS: table values plus 128, so products with int8 need int32.
def by_halves(tokens: int) -> Inline:
    """Activations for 16 bytes of nibbles a group: of each 128 the even 16s, then the odd; -128 times their sums of 32,
    int32."""

    def arrange(q: int, sums: int, n_blocks: int, x: int, token: int) -> None:
        for b in range(n_blocks):
            place = b * tokens + token
            y, source = x + 256 * place, q + 256 * b
            for i in unroll(16):
                store(y + 128 * (i // 8) + 64 * (i % 2) + 16 * (i // 2 % 4), load_i8x16(source + 16 * i))
            both = mul_pairs_i16(load_i16x16(sums + 32 * b), splat_i16x16(-128))
            store(x + 256 * tokens * n_blocks + 32 * place, both)

    return inline(arrange)


iq4_values = lookup("iq4", 64, 128)
_with_zeros = permute2("i32x8", list(range(16)))


@inline
def iq4_codes(p: int, half: int) -> tuple[Vector, Vector]:
    """Table values of 128 weights."""
    w = load_i8x64(p + 8 + 64 * half)
    return iq4_values(low4(w)), iq4_values(high4(w))


@inline
def iq4_scales(p: int) -> Vector:
    """8 scales, int32."""
    return load_iq4_scales(p + 2)


@inline
def iq4_start(scales: Vector, sums: int) -> Vector:
    """-128 times the sums of 32 times their scales."""
    return _with_zeros(mul(scales, load_i32x8(sums)), splat_i32x8(0))


@inline
def add_iq4(isum: Vector, low: Vector, high: Vector, x: int, scales: Vector) -> Vector:
    """isum + 128 weights of a super-block."""
    dot = dot_unsigned(splat_i32x16(0), low, load_i8x64(x))
    return add(isum, mul(dot_unsigned(dot, high, load_i8x64(x + 64)), scales))


Q6_K = Shifted(210, 208, q6_codes, q6_scales, q6_start, scales_of_sixteens, add_q6, step=8, sums_bytes=64)
IQ4_XS = Shifted(136, 0, iq4_codes, iq4_scales, iq4_start, scales_of_lanes, add_iq4, step=4, sums_bytes=32)

FORMATS: dict[str, tuple[Callable[[int], Inline], Arrange]] = {
    "q4_k": (partial(values_with_minima, 144, q4_codes), by_sixteens),
    "q5_k": (partial(values_with_minima, 176, q5_codes), by_sixteens),
    "q6_k": (partial(values_shifted, Q6_K), with_sixteens),
    "iq4_xs": (partial(values_shifted, IQ4_XS), by_halves),
}
"""Types with 512-bit kernels: for a number of tokens, the values of a row and how its activations are arranged."""


@cache
def row_kernel(name: str, tokens: int = 1) -> Kernel:
    """The kernel of a type in FORMATS for so many tokens at once."""
    values_of_row, arrange = FORMATS[name]
    return matmul_row.row_kernel(name, 256, values_of_row(tokens), arrange(tokens), tokens)
