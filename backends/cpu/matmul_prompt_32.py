"""Types with blocks of 32 weights times more than eight tokens, in AMX tiles: the products of matmul_tile_32.py.

A block of 16 rows is unpacked as there, into memory, where it is a right operand of depth 32: its columns are rows of
weights. 16 tokens' activations of the block are a left operand as they lie. A tile product gives 16 tokens' exact sums
for 16 rows, a vector a token; numbers and their order are in matmul_32.py, codes being what they stand for (offset 0).

Tile products wait for what has just been stored, and the loads of their results for them. So a block is unpacked after
the first product of the one before, and 16 tokens' sums are used after the product of the next 16.
"""

from __future__ import annotations

from functools import cache

from edgellm.backends.cpu.jit import Kernel, inline, kernel
from edgellm.backends.cpu.matmul_32 import Format32
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
from edgellm.backends.cpu.matmul_tile_32 import block_unpacker
from edgellm.backends.cpu.simd import add, fma, load_i64, mul, prefetch, registers, store, sub, unroll
from edgellm.backends.cpu.simd_amx import ROWS, tile_products, tiles_off, tiles_on
from edgellm.backends.cpu.simd_wide import (
    broadcast_floats,
    ints_to_floats,
    load_floats,
    load_ints,
    splat_bytes,
    splat_floats,
)

__all__ = ["PANEL", "SCRATCH", "prompt_kernel"]

PANEL = 16
"""Tokens of a tile product."""
TOKENS_AT_ONCE = 128
"""Tokens that a block is unpacked for; what they need of x and y stays in the first-level cache."""

# Scratch. An unpacked block: codes [8][16][4] int8, then d and m [16] float32; the next one after it.
D_AT, M_AT, BLOCK = 512, 576, 640
PRODUCTS = 2 * BLOCK  # two results in turn
SUMS_AT = PRODUCTS + 2 * 1024  # sums of q as float32 [16]
Y = SUMS_AT + 64  # [token][16] float32
SCRATCH = Y + 64 * TOKENS_AT_ONCE
"""Bytes a thread needs."""


@cache
def prompt_kernel(form: Format32) -> Kernel:
    """Kernel over units of 16 rows (there are as many) and panels of 16 tokens; args as in matmul_args.py, no order."""
    type_size, minimum, offset = form.type_size, form.minimum, 0 if form.table else form.offset
    unpack, near = block_unpacker(form, 0), (64 + type_size // 2) // type_size

    @inline
    def unpack_block(p: int, row_bytes: int, ahead: int, block: int) -> None:
        w = registers(8)
        w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], d, m = unpack(p, row_bytes, ahead)
        for k in unroll(8):
            if offset != 0:
                w[k] = sub(w[k], splat_bytes(offset))
            store(block + 64 * k, w[k])
        store(block + D_AT, d)
        if minimum:
            store(block + M_AT, m)

    @inline
    def add_values(products: int, block: int, sums: int, dx: int, spare: int, y: int) -> None:
        d = load_floats(block + D_AT)
        if minimum:
            m = load_floats(block + M_AT)
            store(spare, ints_to_floats(load_ints(sums)))
        for t in unroll(ROWS):
            value = mul(ints_to_floats(load_ints(products + 64 * t)), d)
            if minimum:
                value = fma(broadcast_floats(spare + 4 * t), m, value)
            store(y + 64 * t, fma(value, broadcast_floats(dx + 4 * t), load_floats(y + 64 * t)))

    def prompt(args: int, begin: int, end: int, scratch: int) -> None:
        row_bytes, n_rows, n_blocks = load_i64(args + ROW_BYTES), load_i64(args + N_ROWS), load_i64(args + N_BLOCKS)
        n_tokens, stride = load_i64(args + N_TOKENS), load_i64(args + ALL_PANELS) * PANEL
        parts = (n_tokens + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
        tiles_on(scratch, ROWS)
        for work in range(begin * parts, end * parts):
            row, first = min(work // parts * ROWS, n_rows - ROWS), work % parts * TOKENS_AT_ONCE
            some = min(n_tokens - first, TOKENS_AT_ONCE)
            panels = (some + PANEL - 1) // PANEL
            p = load_i64(args + WEIGHTS) + row * row_bytes
            ahead = p + 2 * ROWS * row_bytes
            for token in range(PANEL * panels):
                store(scratch + Y + 64 * token, splat_floats(0.0))
            unpack_block(p, row_bytes, ahead, scratch)
            for b in range(n_blocks):
                if b % near == 0:
                    for j in unroll(ROWS):
                        prefetch(p + j * row_bytes + 128)
                p, ahead = p + type_size, ahead + ROWS * type_size
                place, block = b * stride + first, scratch + b % 2 * BLOCK
                x = load_i64(args + Q) + 32 * place
                tile_products(x, 32, block, scratch + PRODUCTS, 32, ROWS)
                if b + 1 < n_blocks:
                    unpack_block(p, row_bytes, ahead, scratch + (b + 1) % 2 * BLOCK)
                sums, dx = load_i64(args + SUMS) + 4 * place, load_i64(args + D) + 4 * place
                for panel in range(panels):
                    if panel + 1 < panels:
                        other = scratch + PRODUCTS + (panel + 1) % 2 * 1024
                        tile_products(x + 512 * (panel + 1), 32, block, other, 32, ROWS)
                    products, y = scratch + PRODUCTS + panel % 2 * 1024, scratch + Y + 1024 * panel
                    add_values(products, block, sums + 64 * panel, dx + 64 * panel, scratch + SUMS_AT, y)
            out, bias = load_i64(args + OUT) + 4 * row, load_i64(args + BIAS)
            for token in range(some):
                y = load_floats(scratch + Y + 64 * token)
                if bias:
                    y = add(y, load_floats(bias + 4 * row))
                store(out + (first + token) * load_i64(args + OUT_STRIDE), y)
        tiles_off()

    return kernel(prompt, f"linear_{form.name}_prompt")
