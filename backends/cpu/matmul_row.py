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
    load_i8x16,
    load_i64,
    registers,
    reinterpret,
    splat_f32x8,
    store,
    store_f32,
    unroll,
)
from edgellm.backends.cpu.simd_pack import transpose_8x8, transposed_8x8
from edgellm.backends.cpu.simd_wide import LANES

__all__ = ["AHEAD", "TOGETHER", "row_kernel", "row_scratch", "values_bytes"]

AHEAD = 6144
"""Bytes ahead of a row's reads that are asked for, into the second-level cache (the first has too few miss buffers for
memory's latency), a line at a time between the arithmetic; measured."""

TOGETHER = 4
"""Blocks that 512-bit kernels read at once."""
as_floats = reinterpret("i32x8", "f32x8")


@inline
def values_bytes(n_blocks: int) -> int:
    """Bytes of one row's values for one token."""
    return (n_blocks + 7) // 8 * 32


@inline
def add_in_order(values: int, stride: int, n_blocks: int, d: int, out: int, spare: int) -> None:
    """Eight rows' block values (`stride` bytes apart) -> eight sums at `out`; `spare`: 256 bytes."""
    y = splat_f32x8(0.0)
    for b in range(0, n_blocks - 7, 8):
        c = registers(8)
        c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7] = transposed_8x8(values + 4 * b, stride)
        for i in unroll(8):
            y = fma(as_floats(c[i]), splat_f32x8(load_f32(d + 4 * (b + i))), y)
    first = n_blocks // 8 * 8
    if first < n_blocks:
        transpose_8x8(values + 4 * first, stride, spare, 32)
        for i in range(n_blocks - first):
            y = fma(load_f32x8(spare + 32 * i), splat_f32x8(load_f32(d + 4 * (first + i))), y)
    store(out, y)


@inline
def copy_row(source: int, nbytes: int, target: int) -> None:
    """At least 16 bytes."""
    for at in range(0, nbytes, 16):
        place = min(at, nbytes - 16)
        store(target + place, load_i8x16(source + place))


def row_kernel(name: str, block: int, values_of_row: Inline, arrange: Inline | None = None, tokens: int = 1) -> Kernel:
    """Kernel over units of LANES rows; args as in matmul_args.py, one token a panel, `tokens` done at once.

    `block`: weights a block. `values_of_row(weights, q, sums, n_blocks, values)` writes a row's values, float32, up to
    the next multiple of eight, each token's `values_bytes` behind those of the one before; sums lie `block` / 8 bytes a
    block. `arrange(q, sums, n_blocks, x, token)` writes a token's activations to where `values_of_row` wants them: its
    q is x, its sums lie `block` bytes a block and token further; both have that size. More than one token needs it.
    With it, `values_of_row` may read and write `TOGETHER` blocks even where a row has fewer.
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
            spare_row = values + 8 * tokens * apart
            if arranged:
                target = spare_row + block * TOGETHER
                for t in range(tokens):
                    at = min(t, some_tokens - 1) * n_blocks
                    arrange(x + block * at, sums + block // 8 * at, n_blocks, target, t)  # type: ignore[misc]
                x, sums = target, target + tokens * block * n_blocks
            for first in range(begin * LANES, stop, 8):
                some = stop - first if stop - first < 8 else 8
                p = load_i64(args + WEIGHTS) + first * row_bytes
                for r in range(some):
                    row = p + r * row_bytes
                    if arranged and n_blocks < TOGETHER:
                        copy_row(row, row_bytes, spare_row)
                        row = spare_row
                    values_of_row(row, x, sums, n_blocks, values + r * tokens * apart)
                for t in range(some_tokens):
                    d = load_i64(args + D) + 4 * (token + t) * n_blocks
                    out = load_i64(args + OUT) + (token + t) * load_i64(args + OUT_STRIDE) + 4 * first
                    target = out if some == 8 else scratch
                    add_in_order(values + t * apart, tokens * apart, n_blocks, d, target, scratch + 32)
                    if some < 8:
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
    activations = 2 * tokens * block * max(n_blocks, TOGETHER)
    return 512 + 8 * tokens * values_bytes(n_blocks) + block * TOGETHER + activations + 64
