"""K-type weights times two or more tokens: LANES rows of one super-block become an L1 tile, used for all tokens.

For a row, a token and a super-block (256 weights), with codes c, group scales s, group offsets m, activations q:

    isum = sum over groups of s (sum of c q)       exact, int32
    msum = sum over groups of m (sum of q)         exact, int32
    value = d isum - dmin msum                     types with minima (Q2_K, Q4_K, Q5_K)
    value = d (isum - offset msum)                 the others; their m are the scales
    y = fma(value, d_activation, y)                float32, super-blocks in rising order

The row kernels (matmul_row_k.py) compute the same numbers in the same order, so the bits are equal.

Tile, one weight row per lane: codes [64][LANES][4] bytes; scales [16][LANES] int32 (without a dot instruction: the
scale twice as int16); offsets [8][LANES] pairs of int16; d and dmin [LANES] float32; [16][LANES] words of bits that
several pieces of the codes need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from edgellm.backends.cpu.jit import Inline, Kernel, inline, kernel
from edgellm.backends.cpu.matmul_args import (
    ALL_PANELS,
    BIAS,
    N_BLOCKS,
    N_ROWS,
    N_TOKENS,
    ORDER,
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
    fma,
    load_i32,
    load_i64,
    mul,
    mul_pairs_i16,
    mul_pairs_u8,
    prefetch,
    registers,
    store,
    sub,
    unroll,
)
from edgellm.backends.cpu.simd_dot import add_pairs, dot_unsigned, dot_wide
from edgellm.backends.cpu.simd_wide import (
    HAS_DOT,
    LANES,
    WIDE_OFFSET,
    broadcast_bytes,
    broadcast_floats,
    broadcast_pairs,
    ints_to_floats,
    load_bytes,
    load_floats,
    load_ints,
    load_pairs,
    splat_floats,
    splat_ints,
)

VECTOR = 4 * LANES
SCALES = 64 * VECTOR
OFFSETS = SCALES + 16 * VECTOR
D_TILE = OFFSETS + 8 * VECTOR
DMIN_TILE = D_TILE + VECTOR
BITS = DMIN_TILE + VECTOR
TILE_BYTES = BITS + 16 * VECTOR
TOKENS_AT_ONCE = 8 if LANES == 16 else 4
"""Tokens whose accumulators fit in the registers."""


@dataclass(frozen=True)
class KFormat:
    """How one K type's tile is to be used."""

    name: str
    type_size: int
    scales: Inline
    """(first block of LANES rows, bytes between rows, tile): fills the tile but for its codes."""
    codes: Inline
    """(the same, number of a piece, 0 to 3) -> codes of 64 weights of every row, once the tile has the rest: eight
    vectors of four from `first_code` on, and eight of those that follow `apart` vectors further."""
    group: int
    """Weights that share a scale: 16 or 32."""
    sums: int
    """Sums of two products that add up in int16 without overflow; 0: signed codes, stored plus WIDE_OFFSET."""
    offset: int = 0
    """What codes are stored plus; 0 when the type has minima."""
    apart: int = 8
    """Vectors from a piece's first eight to its others: 8 or 16."""

    @property
    def unpack(self) -> Inline:
        """(first block of LANES rows, bytes between rows, tile): fills the tile."""
        scales, codes_of, apart = self.scales, self.codes, self.apart

        def fill(source: int, stride: int, tile: int) -> None:
            scales(source, stride, tile)
            for piece in range(4):
                codes = codes_of(source, stride, tile, piece)
                at = tile + first_code(piece, apart) * VECTOR
                for i in unroll(8):
                    store(at + i * VECTOR, codes[i])
                    store(at + (apart + i) * VECTOR, codes[8 + i])

        return inline(fill)


@inline
def first_code(piece: int, apart: int) -> int:
    """A piece's first vector of codes in the tile."""
    return 16 * piece if apart == 8 else piece // 2 * 32 + piece % 2 * 8


def value_from(form: KFormat) -> Inline:
    """(isum, msum, tile) -> value; msum is not looked at where the codes are stored as they are."""
    wide = form.sums == 0
    offset = (WIDE_OFFSET if wide else 0) + form.offset
    minima = form.offset == 0 and not wide

    def value_of(isum: Vector, msum: Vector, tile: int) -> Vector:
        if minima:
            lows = mul(ints_to_floats(msum), load_floats(tile + DMIN_TILE))
            return sub(mul(ints_to_floats(isum), load_floats(tile + D_TILE)), lows)
        else:
            exact = sub(isum, mul(msum, splat_ints(offset))) if offset else isum
            return mul(ints_to_floats(exact), load_floats(tile + D_TILE))

    return inline(value_of)


@cache
def tile_kernel(form: KFormat, panel: int) -> Kernel:
    """Kernel over units of LANES rows; args as in matmul_args.py."""
    unpack, value_of = form.unpack, value_from(form)
    type_size, group, wide = form.type_size, form.group, form.sums == 0
    sums_16 = min(form.sums, group // 4)
    offset = (WIDE_OFFSET if wide else 0) + form.offset
    minima = form.offset == 0 and not wide
    block = min(panel, TOKENS_AT_ONCE)
    dot = dot_wide if wide else dot_unsigned
    by_dots = HAS_DOT or wide
    scale_by_pairs = not HAS_DOT and not wide
    # The next rows are asked for while these are used: half before unpacking, half between the groups' products. All
    # at once would fill the core's miss buffers and hold up the loads behind (measured: 5 to 25% slower).
    lines_first = LANES * type_size // 128
    lines_each = -(-(LANES * type_size // 64 - lines_first) // (256 // group))

    def tile(args: int, begin: int, end: int, scratch: int) -> None:
        row_bytes, n_rows, n_blocks = load_i64(args + ROW_BYTES), load_i64(args + N_ROWS), load_i64(args + N_BLOCKS)
        n_tokens, stride = load_i64(args + N_TOKENS), load_i64(args + ALL_PANELS) * panel
        n_panels, order = (n_tokens + panel - 1) // panel, load_i64(args + ORDER)
        partial = scratch + TILE_BYTES
        for unit in range(begin, end):
            row = unit * LANES if unit * LANES + LANES <= n_rows else n_rows - LANES
            weights = load_i64(args + WEIGHTS) + row * row_bytes
            q, sums, d = load_i64(args + Q), load_i64(args + SUMS), load_i64(args + D)
            for token in range(n_panels * panel):
                store(partial + token * VECTOR, splat_floats(0.0))
            for b in range(n_blocks):
                ahead = weights + LANES * row_bytes + b * (LANES * type_size)
                for line in range(lines_first):
                    prefetch(ahead + 64 * line)
                ahead += 64 * lines_first
                unpack(weights + b * type_size, row_bytes, scratch)
                for part in range(n_panels * (panel // block)):
                    first = part % (panel // block) * block
                    p = part // (panel // block)
                    x = q + 256 * (p * panel + first)
                    total = registers(block)
                    dots = registers(block)
                    low = registers(block)
                    for t in unroll(block):
                        total[t] = splat_ints(0)
                    for g in range(256 // group):
                        if part == 0:
                            for line in unroll(lines_each):
                                prefetch(ahead + 64 * line)
                            ahead += 64 * lines_each
                        codes = scratch + g * (group // 4 * VECTOR)
                        bytes_x = x + g * group
                        scale = load_ints(scratch + SCALES + g * VECTOR)
                        if by_dots:
                            for t in unroll(block):
                                dots[t] = splat_ints(0)
                            for k in range(group // 4):
                                w = load_bytes(codes + k * VECTOR)
                                for t in unroll(block):
                                    dots[t] = dot(dots[t], w, broadcast_bytes(bytes_x + 4 * k + 256 * t))
                            for t in unroll(block):
                                total[t] = add(total[t], mul(dots[t], scale))
                        if scale_by_pairs:
                            for s in unroll(group // 4 // sums_16):
                                w = load_bytes(codes + s * (sums_16 * VECTOR))
                                for t in unroll(block):
                                    place = bytes_x + 4 * s * sums_16 + 256 * t
                                    low[t] = mul_pairs_u8(w, broadcast_bytes(place))
                                for k in unroll(sums_16 - 1):
                                    w = load_bytes(codes + (s * sums_16 + k + 1) * VECTOR)
                                    for t in unroll(block):
                                        place = bytes_x + 4 * (s * sums_16 + k + 1) + 256 * t
                                        low[t] = add(low[t], mul_pairs_u8(w, broadcast_bytes(place)))
                                for t in unroll(block):
                                    total[t] = add(
                                        total[t], mul_pairs_i16(low[t], load_pairs(scratch + SCALES + g * VECTOR))
                                    )
                    if offset != 0 or minima:
                        for t in unroll(block):
                            dots[t] = splat_ints(0)
                        for j in range(8):
                            pair = load_pairs(scratch + OFFSETS + j * VECTOR)
                            for t in unroll(block):
                                place = sums + 32 * (p * panel + first + t) + 4 * j
                                dots[t] = add_pairs(dots[t], pair, broadcast_pairs(place))
                    for t in unroll(block):
                        token = p * panel + first + t
                        value = value_of(total[t], dots[t], scratch)
                        y = partial + token * VECTOR
                        store(y, fma(value, broadcast_floats(d + 4 * token), load_floats(y)))
                q += stride * 256
                sums += stride * 32
                d += stride * 4
            out, bias = load_i64(args + OUT) + 4 * row, load_i64(args + BIAS)
            for token in range(n_tokens):
                y = load_floats(partial + token * VECTOR)
                if bias:
                    y = add(y, load_floats(bias + 4 * row))
                place = load_i32(order + 4 * token) if order else token
                store(out + place * load_i64(args + OUT_STRIDE), y)

    return kernel(tile, f"linear_{form.name}_tile{panel}")
