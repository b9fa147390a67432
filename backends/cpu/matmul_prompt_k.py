"""K types (but IQ4_XS) times more than eight tokens, in AMX tiles: the products of matmul_tile_k.py.

A tile of 16 rows is unpacked as there. Its codes are a right operand (columns are rows of weights), but each group has
a scale. A scale is written as up to four digits of a few bits, so that a code times a digit is still an int8:

    isum = sum over groups of s (sum of c q) = sum over digits i of 2^(bits i) (sum of (c s_i) q)

The codes times each digit, made once for all tokens, give a super-block's sum over all groups in one tile register. 16
tokens' activations are the left operand as they lie. All is exact, so the bits are those of matmul_tile_k.py. Types
without minima have signed codes c - offset and signed scales: their last digit goes from -2^(bits-1) on.
"""

from __future__ import annotations

from functools import cache

from edgellm.backends.cpu.jit import Kernel, inline, kernel
from edgellm.backends.cpu.matmul_args import (
    ALL_PANELS,
    BIAS,
    N_BLOCKS,
    N_ROWS,
    N_TOKENS,
    OUT,
    OUT_STRIDE,
    ROW_BYTES,
    SUMS,
    WEIGHTS,
    D,
    Q,
)
from edgellm.backends.cpu.matmul_tile_k import D_TILE, DMIN_TILE, OFFSETS, SCALES, TILE_BYTES, VECTOR, KFormat
from edgellm.backends.cpu.simd import (
    add,
    bit_and,
    bit_or,
    bit_xor,
    fma,
    load_i64,
    mul,
    prefetch,
    registers,
    reinterpret,
    shift_left,
    store,
    sub,
    unroll,
)
from edgellm.backends.cpu.simd_amx import ROWS, square_tiles_on, tile_sums, tiles_off
from edgellm.backends.cpu.simd_dot import add_pairs
from edgellm.backends.cpu.simd_pack import shifted
from edgellm.backends.cpu.simd_wide import (
    BYTES,
    PAIRS,
    broadcast_floats,
    broadcast_pairs,
    ints_as_bytes,
    ints_as_pairs,
    ints_to_floats,
    load_floats,
    load_ints,
    load_pairs,
    splat_bytes,
    splat_floats,
    splat_ints,
)

__all__ = ["PANEL", "PIECES", "prompt_kernel", "prompt_scratch"]

PANEL = 16
"""Tokens of a tile product."""
PIECES = {"q2_k": (1, 4), "q3_k": (2, 3), "q4_k": (2, 3), "q5_k": (3, 2), "q6_k": (4, 2)}
"""Types: digits of a scale, and bits of a digit. Every code (to 3, 15, 31; -4 to 3, -32 to 31) times every digit is an
int8."""

# Scratch: a tile, then
SCALED = -(-TILE_BYTES // 64) * 64  # codes times each digit [4][64][16][4] int8
PRODUCTS = SCALED + 4 * 4096  # two results in turn [2][4][16][16] int32
Y = PRODUCTS + 2 * 4 * 1024  # [token][16] float32


pairs_as_bytes = reinterpret(PAIRS, BYTES)


def prompt_scratch(n_panels: int) -> int:
    """Bytes a thread needs."""
    return Y + n_panels * PANEL * 64


@cache
def prompt_kernel(form: KFormat) -> Kernel:
    """Kernel over units of 16 rows and panels of 16 tokens; args as in matmul_args.py, no order."""
    unpack, type_size, group = form.unpack, form.type_size, form.group
    pieces, bits = PIECES[form.name]
    offset, half, lines = form.offset, 2 ** (bits - 1), ROWS * type_size // 128

    @inline
    def scale_codes(tile: int) -> None:
        digits, minus = registers(4), registers(4)
        for g in range(256 // group):
            s = load_ints(tile + SCALES + g * VECTOR)
            for i in unroll(pieces):
                digit = bit_and(shifted(s, -bits * i), splat_ints(2**bits - 1))
                if offset != 0:
                    if i == pieces - 1:
                        digit = bit_xor(digit, splat_ints(half))  # the digit plus `half`
                    minus[i] = ints_as_bytes(mul(digit, splat_ints(0x01010101 * offset)))
                digits[i] = ints_as_pairs(bit_or(digit, shift_left(digit, 16)))
            for k in unroll(group // 4):
                at = tile + (g * (group // 4) + k) * VECTOR
                codes = load_pairs(at)
                for i in unroll(pieces):
                    scaled = pairs_as_bytes(mul(codes, digits[i]))  # no carry from one byte into the next
                    if offset != 0:
                        scaled = sub(scaled, minus[i])
                        if i == pieces - 1:
                            times_half = ints_as_bytes(shift_left(load_ints(at), bits - 1))
                            scaled = add(sub(scaled, times_half), splat_bytes(half * offset))
                    store(at + SCALED + 4096 * i, scaled)

    @inline
    def add_values(tile: int, products: int, sums: int, d: int, y: int) -> None:
        minima = registers(8)
        d_rows = load_floats(tile + D_TILE)
        if offset == 0:
            dmin = load_floats(tile + DMIN_TILE)
            for j in unroll(8):
                minima[j] = load_pairs(tile + OFFSETS + j * VECTOR)
        for t in range(PANEL):
            total = load_ints(products + 64 * t)
            for i in unroll(pieces - 1):
                total = add(total, shift_left(load_ints(products + 1024 * (i + 1) + 64 * t), bits * (i + 1)))
            value = mul(ints_to_floats(total), d_rows)
            if offset == 0:
                lows = splat_ints(0)
                for j in unroll(8):
                    lows = add_pairs(lows, minima[j], broadcast_pairs(sums + 32 * t + 4 * j))
                value = sub(value, mul(ints_to_floats(lows), dmin))
            store(y + 64 * t, fma(value, broadcast_floats(d + 4 * t), load_floats(y + 64 * t)))

    def prompt(args: int, begin: int, end: int, scratch: int) -> None:
        row_bytes, n_rows, n_blocks = load_i64(args + ROW_BYTES), load_i64(args + N_ROWS), load_i64(args + N_BLOCKS)
        n_tokens, stride = load_i64(args + N_TOKENS), load_i64(args + ALL_PANELS) * PANEL
        panels = (n_tokens + PANEL - 1) // PANEL
        square_tiles_on(scratch)
        for unit in range(begin, end):
            row = min(unit * ROWS, n_rows - ROWS)
            weights = load_i64(args + WEIGHTS) + row * row_bytes
            q, sums, d = load_i64(args + Q), load_i64(args + SUMS), load_i64(args + D)
            for token in range(panels * PANEL):
                store(scratch + Y + 64 * token, splat_floats(0.0))
            for b in range(n_blocks):
                # The next rows: half before unpacking, half after; all at once would fill the core's miss buffers.
                ahead = weights + ROWS * row_bytes + b * (ROWS * type_size)
                for line in range(lines):
                    prefetch(ahead + 64 * line)
                unpack(weights + b * type_size, row_bytes, scratch)
                scale_codes(scratch)
                for line in range(lines):
                    prefetch(ahead + 64 * (lines + line))
                # 16 tokens' sums are used after the product of the next 16: loads of a result wait for it.
                tile_sums(q, scratch + SCALED, scratch + PRODUCTS, pieces)
                for p in range(panels):
                    if p + 1 < panels:
                        other = scratch + PRODUCTS + (p + 1) % 2 * 4096
                        tile_sums(q + 4096 * (p + 1), scratch + SCALED, other, pieces)
                    products, y = scratch + PRODUCTS + p % 2 * 4096, scratch + Y + 1024 * p
                    add_values(scratch, products, sums + 512 * p, d + 64 * p, y)
                q, sums, d = q + stride * 256, sums + stride * 32, d + stride * 4
            out, bias = load_i64(args + OUT) + 4 * row, load_i64(args + BIAS)
            for token in range(n_tokens):
                y = load_floats(scratch + Y + 64 * token)
                if bias:
                    y = add(y, load_floats(bias + 4 * row))
                store(out + token * load_i64(args + OUT_STRIDE), y)
        tiles_off()

    return kernel(prompt, f"linear_{form.name}_prompt")
