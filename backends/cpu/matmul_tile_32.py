"""Types with blocks of 32 weights times two or more tokens: eight blocks of LANES rows at a time become an L1 tile.

Numbers and their order are in matmul_32.py.
"""

from __future__ import annotations

from functools import cache

from edgellm.backends.cpu.jit import Kernel, kernel
from edgellm.backends.cpu.matmul_32 import BLOCK_TILE, D_TILE, MIN_TILE, TILE_BYTES, VECTOR, Format32, unpacker
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
from edgellm.backends.cpu.matmul_tile_k import TOKENS_AT_ONCE
from edgellm.backends.cpu.simd import (
    add,
    fma,
    load_i32,
    load_i64,
    mul,
    mul_pairs_i16,
    mul_pairs_u8,
    prefetch,
    registers,
    splat_i16x16,
    store,
    sub,
    unroll,
)
from edgellm.backends.cpu.simd_dot import dot_unsigned, dot_wide
from edgellm.backends.cpu.simd_wide import (
    HAS_DOT,
    LANES,
    WIDE_OFFSET,
    broadcast_bytes,
    broadcast_floats,
    broadcast_ints,
    ints_to_floats,
    load_bytes,
    load_floats,
    splat_floats,
    splat_ints,
)


@cache
def tile_kernel(form: Format32, panel: int) -> Kernel:
    """Kernel over units of LANES rows of at least eight blocks; args as in matmul_args.py."""
    unpack, type_size, wide, minimum = unpacker(form), form.type_size, form.sums == 0, form.minimum
    offset = WIDE_OFFSET if wide else form.offset
    sums_16 = form.sums
    block = min(panel, TOKENS_AT_ONCE)
    dot = dot_wide if wide else dot_unsigned
    by_dots = HAS_DOT or wide
    # As in matmul_tile_k.py: lines of the next rows to ask for, before a block is unpacked and while it is used.
    lines_first = LANES * type_size // 128
    lines_each = -(-LANES * type_size // 64) - lines_first

    def tile(args: int, begin: int, end: int, scratch: int) -> None:
        row_bytes, n_rows, n_blocks = load_i64(args + ROW_BYTES), load_i64(args + N_ROWS), load_i64(args + N_BLOCKS)
        n_tokens, width = load_i64(args + N_TOKENS), load_i64(args + ALL_PANELS) * panel
        n_panels, order = (n_tokens + panel - 1) // panel, load_i64(args + ORDER)
        partial = scratch + TILE_BYTES
        for unit in range(begin, end):
            row = unit * LANES if unit * LANES + LANES <= n_rows else n_rows - LANES
            weights = load_i64(args + WEIGHTS) + row * row_bytes
            for token in range(n_panels * panel):
                store(partial + token * VECTOR, splat_floats(0.0))
            for b in range(0, n_blocks, 8):
                some = n_blocks - b if n_blocks - b < 8 else 8
                ahead = weights + LANES * row_bytes + b * (LANES * type_size)
                for line in range(some * lines_first):
                    prefetch(ahead + 64 * line)
                ahead += some * (64 * lines_first)
                # A short last piece is read with blocks before it, so that nothing behind the row is touched.
                unpack(weights + (b + some - 8) * type_size, row_bytes, scratch)
                for part in range(n_panels * (panel // block)):
                    first = part // (panel // block) * panel + part % (panel // block) * block
                    x = load_i64(args + Q) + (b * width + first // panel * panel) * 32 + 4 * (first % panel)
                    sums = load_i64(args + SUMS) + 4 * (b * width + first)
                    d = load_i64(args + D) + 4 * (b * width + first)
                    y = registers(block)
                    dots = registers(block)
                    low = registers(block)
                    for t in unroll(block):
                        y[t] = load_floats(partial + (first + t) * VECTOR)
                    for i in range(some):
                        slot = scratch + (8 - some + i) * BLOCK_TILE
                        if part == 0:
                            for line in unroll(lines_each):
                                prefetch(ahead + 64 * line)
                            ahead += 64 * lines_each
                        if by_dots:
                            for t in unroll(block):
                                dots[t] = splat_ints(0)
                            for k in range(8):
                                w = load_bytes(slot + k * VECTOR)
                                for t in unroll(block):
                                    dots[t] = dot(dots[t], w, broadcast_bytes(x + 4 * (k * panel + t)))
                        else:
                            for s in unroll(8 // sums_16):
                                w = load_bytes(slot + s * sums_16 * VECTOR)
                                for t in unroll(block):
                                    low[t] = mul_pairs_u8(w, broadcast_bytes(x + 4 * (s * sums_16 * panel + t)))
                                for k in unroll(sums_16 - 1):
                                    w = load_bytes(slot + (s * sums_16 + k + 1) * VECTOR)
                                    for t in unroll(block):
                                        place = x + 4 * ((s * sums_16 + k + 1) * panel + t)
                                        low[t] = add(low[t], mul_pairs_u8(w, broadcast_bytes(place)))
                                for t in unroll(block):
                                    if s == 0:
                                        dots[t] = mul_pairs_i16(low[t], splat_i16x16(1))
                                    else:
                                        dots[t] = add(dots[t], mul_pairs_i16(low[t], splat_i16x16(1)))
                        for t in unroll(block):
                            if offset != 0:
                                dots[t] = sub(dots[t], mul(broadcast_ints(sums + 4 * t), splat_ints(offset)))
                            value = mul(ints_to_floats(dots[t]), load_floats(slot + D_TILE))
                            if minimum:
                                sum_x = ints_to_floats(broadcast_ints(sums + 4 * t))
                                value = fma(sum_x, load_floats(slot + MIN_TILE), value)
                            y[t] = fma(value, broadcast_floats(d + 4 * t), y[t])
                        x += 32 * width
                        sums += 4 * width
                        d += 4 * width
                    for t in unroll(block):
                        store(partial + (first + t) * VECTOR, y[t])
            out, bias = load_i64(args + OUT) + 4 * row, load_i64(args + BIAS)
            for token in range(n_tokens):
                total = load_floats(partial + token * VECTOR)
                if bias:
                    total = add(total, load_floats(bias + 4 * row))
                place = load_i32(order + 4 * token) if order else token
                store(out + place * load_i64(args + OUT_STRIDE), total)

    return kernel(tile, f"linear_{form.name}_tile{panel}")
