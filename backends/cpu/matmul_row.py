"""K types times one token, or a few: rows are read one after the other, each in order of its bytes.

The values of a row's blocks (the numbers before the scale of x) go to scratch; then eight rows together, one in each
lane, take their blocks in rising order, one FMA each. So no float sum ever runs along a vector, and the order is that
of the tile kernels.
"""

from __future__ import annotations

from edgellm.backends.cpu.jit import Inline, Kernel, inline, kernel
from edgellm.backends.cpu.matmul_args import (
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
from edgellm.backends.cpu.simd import (
    fma,
    load_f32,
    load_f32x8,
    load_i64,
    splat_f32x8,
    store,
    store_f32,
)
from edgellm.backends.cpu.simd_pack import transpose_8x8
from edgellm.backends.cpu.simd_wide import LANES

__all__ = ["AHEAD", "row_kernel", "row_scratch", "values_bytes"]

AHEAD = 6144
"""Bytes ahead of a row's reads that are asked for, into the second-level cache (the first has too few miss buffers for
memory's latency), a line at a time between the arithmetic; measured."""


@inline
def values_bytes(n_blocks: int) -> int:
    """Bytes of one row's values for one token."""
    return (n_blocks + 7) // 8 * 32


@inline
def add_in_order(values: int, stride: int, n_blocks: int, d: int, out: int) -> None:
    """Eight rows' block values (`stride` bytes apart) -> eight sums at `out` (then 256 bytes of room)."""
    y = splat_f32x8(0.0)
    for b in range(0, n_blocks, 8):
        transpose_8x8(values + 4 * b, stride, out + 32, 32)
        last = n_blocks - b if n_blocks - b < 8 else 8
        for i in range(last):
            y = fma(load_f32x8(out + 32 + 32 * i), splat_f32x8(load_f32(d + 4 * (b + i))), y)
    store(out, y)


def row_kernel(name: str, block: int, values_of_row: Inline, arrange: Inline | None = None, tokens: int = 1) -> Kernel:
    """Kernel over units of LANES rows; args as in matmul_args.py, one token a panel, `tokens` done at once.

    `block`: weights a block. `values_of_row(weights, q, sums, n_blocks, values)` writes a row's values, float32, up to
    the next multiple of eight, each token's `values_bytes` behind those of the one before; sums lie `block` / 8 bytes a
    block. `arrange(q, sums, n_blocks, x, token)` writes a token's activations to where `values_of_row` wants them: its
    q is x, its sums lie `block` bytes a block and token further; both have that size. More than one token needs it.
    """
    arranged = arrange is not None

    def rows(args: int, begin: int, end: int, scratch: int) -> None:
        row_bytes, n_rows, n_blocks = load_i64(args + ROW_BYTES), load_i64(args + N_ROWS), load_i64(args + N_BLOCKS)
        bias, n_tokens, apart = load_i64(args + BIAS), load_i64(args + N_TOKENS), values_bytes(n_blocks)
        stop = end * LANES if end * LANES < n_rows else n_rows
        values = scratch + 512
        for token in range(0, n_tokens, tokens):
            some_tokens = min(tokens, n_tokens - token)
            x, sums = (
                load_i64(args + Q) + block * token * n_blocks,
                load_i64(args + SUMS) + block // 8 * token * n_blocks,
            )
            if arranged:
                target = values + 8 * tokens * apart
                for t in range(tokens):
                    at = min(t, some_tokens - 1) * n_blocks
                    arrange(x + block * at, sums + block // 8 * at, n_blocks, target, t)  # type: ignore[misc]
                x, sums = target, target + tokens * block * n_blocks
            for first in range(begin * LANES, stop, 8):
                some = stop - first if stop - first < 8 else 8
                p = load_i64(args + WEIGHTS) + first * row_bytes
                for r in range(some):
                    values_of_row(p + r * row_bytes, x, sums, n_blocks, values + r * tokens * apart)
                for t in range(some_tokens):
                    d = load_i64(args + D) + 4 * (token + t) * n_blocks
                    add_in_order(values + t * apart, tokens * apart, n_blocks, d, scratch)
                    out = load_i64(args + OUT) + (token + t) * load_i64(args + OUT_STRIDE) + 4 * first
                    for r in range(some):
                        store_f32(out + 4 * r, load_f32(scratch + 4 * r))
            if bias:
                for t in range(some_tokens):
                    out = load_i64(args + OUT) + (token + t) * load_i64(args + OUT_STRIDE)
                    for row in range(begin * LANES, stop):
                        store_f32(out + 4 * row, load_f32(out + 4 * row) + load_f32(bias + 4 * row))

    return kernel(rows, f"linear_{name}_row" + (f"{tokens}" if tokens > 1 else ""))


def row_scratch(n_blocks: int, block: int, tokens: int = 1) -> int:
    """Bytes of scratch a thread needs."""
    return 512 + tokens * (8 * values_bytes(n_blocks) + 2 * block * n_blocks) + 64
