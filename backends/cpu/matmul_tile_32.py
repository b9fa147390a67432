"""Types with blocks of 32 weights: one block of LANES rows at a time, used for all tokens.

A block's 16 bytes of codes of LANES rows come as four vectors; zipped together, lane r of a vector holds four codes of
row r. They stay in registers while the tokens take their turns. Numbers and their order are in matmul_32.py.
"""

from __future__ import annotations

from functools import cache

from edgellm.backends.cpu.jit import Inline, Kernel, inline, kernel
from edgellm.backends.cpu.matmul_32 import Format32, fifth_bits
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
    bit_and,
    bit_or,
    bit_xor,
    fma,
    load_f32,
    load_i32,
    load_i64,
    mul,
    mul_pairs_i16,
    mul_pairs_u8,
    prefetch,
    prefetch_far,
    registers,
    splat_i16x16,
    store,
    store_f32,
    sub,
    unroll,
)
from edgellm.backends.cpu.simd_dot import dot_unsigned, dot_wide
from edgellm.backends.cpu.simd_pack import (
    exponents_to_floats,
    funnel,
    load_rows_of_four,
    lookup,
    shifted,
    zip_high,
    zip_high_pairs,
    zip_low,
    zip_low_pairs,
)
from edgellm.backends.cpu.simd_wide import (
    HAS_DOT,
    LANES,
    WIDE_OFFSET,
    broadcast_bytes,
    broadcast_floats,
    broadcast_ints,
    ints_as_bytes,
    ints_to_floats,
    load_floats,
    low_halves_to_floats,
    splat_floats,
    splat_ints,
)

VECTOR = 4 * LANES
TOKENS_AT_ONCE = 128
"""Tokens whose sums, and whose part of x for one block, stay in the first-level cache."""
SCRATCH = TOKENS_AT_ONCE * VECTOR
"""Bytes a thread needs: those sums, float32 [token][LANES]."""


def block_unpacker(form: Format32, plus: int) -> Inline:
    """(address of a block, bytes to the next row's, what to ask for) -> LANES rows' codes in eight vectors, d and m (0
    where the type has none). Codes of types that have a table or signed bytes are stored plus `plus`."""
    type_size, at, fifth_at, table = form.type_size, form.at, form.fifth_at, bool(form.table)
    minimum, exponent, is_bytes = form.minimum, form.exponent, form.name == "q8_0"
    values = lookup(form.table or "iq4", VECTOR, plus)
    places, flip = ((0, at, at + 16) if is_bytes else (0, at)), 0x01010101 * plus
    lines, pieces, slots = -(-LANES * type_size // 64), len(places), 4 * len(places)

    @inline
    def scales(head: Vector) -> Vector:
        if exponent:
            return exponents_to_floats(bit_and(head, splat_ints(0xFF)))
        else:
            return low_halves_to_floats(head)

    def unpack(p: int, apart: int, ahead: int) -> tuple[Vector, ...]:
        low, m = splat_ints(0x0F0F0F0F), splat_floats(0.0)
        v, u, w = registers(4), registers(4), registers(8)
        for piece in unroll(pieces):
            for j in unroll(4):
                for line in unroll(lines * (4 * piece + j + 1) // slots - lines * (4 * piece + j) // slots):
                    prefetch_far(ahead + 64 * (lines * (4 * piece + j) // slots + line))
                v[j] = load_rows_of_four(p + places[piece] + j * apart, 4 * apart)
            for j in unroll(2):
                u[j], u[2 + j] = zip_low(v[2 * j], v[2 * j + 1]), zip_high(v[2 * j], v[2 * j + 1])
            for j in unroll(2):
                v[2 * j] = zip_low_pairs(u[2 * j], u[2 * j + 1])
                v[2 * j + 1] = zip_high_pairs(u[2 * j], u[2 * j + 1])
            if piece == 0:
                d = scales(v[0])
                if minimum:
                    m = low_halves_to_floats(shifted(v[0], -16))
                if fifth_at > 0:
                    bits = funnel(v[0], v[1], fifth_at)
            elif is_bytes:
                for k in unroll(4):
                    w[4 * piece - 4 + k] = ints_as_bytes(bit_xor(v[k], splat_ints(flip)))
            else:
                for k in unroll(4):
                    u[0], u[1] = bit_and(v[k], low), bit_and(shifted(v[k], -4), low)
                    if fifth_at > 0:
                        u[0] = bit_or(u[0], fifth_bits(shifted(bits, -4 * k)))
                        u[1] = bit_or(u[1], fifth_bits(shifted(bits, -4 * k - 16)))
                    w[k], w[4 + k] = ints_as_bytes(u[0]), ints_as_bytes(u[1])
                    if table:
                        w[k], w[4 + k] = values(w[k]), values(w[4 + k])
        return w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], d, m

    return inline(unpack)


@cache
def tile_kernel(form: Format32, panel: int) -> Kernel:
    """Kernel over units of LANES rows (of one row, alike in all lanes, where there are fewer); args as in
    matmul_args.py."""
    type_size, signed, minimum, sums_16 = form.type_size, form.sums == 0, form.minimum, form.sums
    offset = WIDE_OFFSET if signed else form.offset
    dot, by_dots = (dot_wide if signed else dot_unsigned), HAS_DOT or signed
    # The rows after the next ones are asked for line by line between the loads: all at once would fill the core's miss
    # buffers. What this block's rows need soon is fetched from the second-level cache into the first.
    unpack, near = block_unpacker(form, offset), (64 + type_size // 2) // type_size

    def tile(args: int, begin: int, end: int, scratch: int) -> None:
        row_bytes, n_rows, n_blocks = load_i64(args + ROW_BYTES), load_i64(args + N_ROWS), load_i64(args + N_BLOCKS)
        n_tokens, order = load_i64(args + N_TOKENS), load_i64(args + ORDER)
        # Bytes of x from one token to the next, of its sums and scales too.
        x_step, step = (32 * n_blocks, 4 * n_blocks) if panel == 1 else (32, 4)
        lone = n_rows < LANES
        apart = 0 if lone else row_bytes
        parts = (n_tokens + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
        for work in range(begin * parts, end * parts):
            unit, first = work // parts, work % parts * TOKENS_AT_ONCE
            last = first + TOKENS_AT_ONCE if first + TOKENS_AT_ONCE < n_tokens else n_tokens
            row = unit if lone else min(unit * LANES, n_rows - LANES)
            p = load_i64(args + WEIGHTS) + row * row_bytes
            ahead = p + 2 * LANES * row_bytes
            for token in range(last - first):
                store(scratch + token * VECTOR, splat_floats(0.0))
            for b in range(n_blocks):
                if b % near == 0:
                    for j in unroll(LANES):
                        prefetch(p + j * row_bytes + 128)
                w = registers(8)
                w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], d, m = unpack(p, apart, ahead)
                place = first * n_blocks + b if panel == 1 else b * load_i64(args + ALL_PANELS) * panel + first
                x, sums = load_i64(args + Q) + 32 * place, load_i64(args + SUMS) + 4 * place
                dx, y = load_i64(args + D) + 4 * place, scratch
                for _ in range(last - first):
                    if by_dots:
                        isum = splat_ints(0)
                        for k in unroll(8):
                            isum = dot(isum, w[k], broadcast_bytes(x + 4 * k))
                    else:
                        isum = splat_ints(0)
                        for s in unroll(8 // sums_16):
                            pairs = mul_pairs_u8(w[s * sums_16], broadcast_bytes(x + 4 * s * sums_16))
                            for k in unroll(sums_16 - 1):
                                q = broadcast_bytes(x + 4 * (s * sums_16 + k + 1))
                                pairs = add(pairs, mul_pairs_u8(w[s * sums_16 + k + 1], q))
                            isum = add(isum, mul_pairs_i16(pairs, splat_i16x16(1)))
                    if offset != 0:
                        isum = sub(isum, mul(broadcast_ints(sums), splat_ints(offset)))
                    value = mul(ints_to_floats(isum), d)
                    if minimum:
                        value = fma(ints_to_floats(broadcast_ints(sums)), m, value)
                    store(y, fma(value, broadcast_floats(dx), load_floats(y)))
                    x, sums, dx, y = x + x_step, sums + step, dx + step, y + VECTOR
                p, ahead = p + type_size, ahead + LANES * type_size
            out, bias = load_i64(args + OUT) + 4 * row, load_i64(args + BIAS)
            for token in range(first, last):
                to = out + (load_i32(order + 4 * token) if order else token) * load_i64(args + OUT_STRIDE)
                y = scratch + (token - first) * VECTOR
                if lone:
                    store_f32(to, load_f32(y) + load_f32(bias + 4 * row) if bias else load_f32(y))
                else:
                    store(to, add(load_floats(y), load_floats(bias + 4 * row)) if bias else load_floats(y))

    return kernel(tile, f"linear_{form.name}_tile{panel}")
