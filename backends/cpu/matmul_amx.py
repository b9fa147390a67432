"""K-type weights times up to four or eight tokens in AMX tiles: 16 rows of codes in the order of their bytes.

A tile product multiplies 16 rows of codes with the activations of 16 lanes. A group of weights is what has one scale;
two groups (for eight tokens) or four (for four) go into one product: each token has as many lanes, and in each lane
stand its activations of one group and zeros for the others. So each lane gets one group's sum. Each row's lanes are
multiplied by their scales and added up over the products; then a token's lanes are added, those of two or four rows
at once. Numbers and their order are those of matmul_tile_k.py.

Tile instructions and vector ones do not overlap (measured: their times add up), but loads from a tile's result and tile
loads of what was just stored wait; hence the order of work. Memory is asked for in between, a row's piece at a time.
"""

from __future__ import annotations

from functools import cache

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
from edgellm.backends.cpu.matmul_unpack_amx import (
    FORMATS,
    FewFormat,
    arranged,
    as_floats,
    evens,
    evens_of_four,
    four_each,
    odds,
    odds_of_four,
    sums_arranged,
    twice_each,
)
from edgellm.backends.cpu.simd import (
    Vector,
    add,
    fma,
    load_f32x4,
    load_f32x8,
    load_i32x4,
    load_i32x16,
    load_i64,
    mul,
    registers,
    shift_left,
    store,
    store_i64,
    sub,
    unroll,
)
from edgellm.backends.cpu.simd_512 import (
    prefetch_share,
)
from edgellm.backends.cpu.simd_amx import (
    load_four_in_all,
    load_pair_in_all,
    tile_products,
    tiles_off,
    tiles_on,
)
from edgellm.backends.cpu.simd_wide import ints_to_floats, load_floats, splat_floats

__all__ = ["FORMATS", "few_kernel", "few_scratch"]

ROWS, UNITS = 16, 2
"""Rows of a unit; units that read a super-block of activations one after the other."""

AHEAD = 2
"""Super-blocks between what is unpacked and what is asked for, into the second-level cache; measured."""

# Scratch. What 16 super-blocks, one a row, come to:
CODES = 0  # [16][256] int8
SCALES = CODES + 16 * 256  # [16][16] int32 or float32, two groups of a product side by side
MINIMA = SCALES + 16 * 64  # [16][16] int8
D_ROWS, DMIN_ROWS = MINIMA + 16 * 16, MINIMA + 16 * 16 + 64  # [16] float32
BLOCK = DMIN_ROWS + 64
# the next 16 in the same way, and
PRODUCTS = 2 * BLOCK  # up to [8][16][width] int32
Y = PRODUCTS + 8 * 1024  # [tokens][tokens][rows] float32: 16 rows are `tokens` times `rows`
X = Y + UNITS * 8 * 64


def x_places(width: int) -> tuple[int, int, int]:
    """Of a super-block of activations, as the products take them: where sums of 32 for the minima begin, where each
    token's scale, and the size of all."""
    return 256 * width, 272 * width, 272 * width + 64


def activations_arranged(form: FewFormat) -> Inline:
    """A call's activations to x, super-block by super-block."""
    tokens, minima = form.tokens, form.minima
    arrange, arrange_sums = arranged(form.width, form.lanes, form.minima), sums_arranged(form.width)
    sums_at, d_at, x_bytes = x_places(form.width)

    def arrange_all(args: int, x: int) -> None:
        for b in range(load_i64(args + N_BLOCKS)):
            at, d = x + x_bytes * b, load_i64(args + D) + 4 * tokens * b
            arrange(load_i64(args + Q) + 256 * tokens * b, at)
            if minima:
                arrange_sums(load_i64(args + SUMS) + 32 * tokens * b, at + sums_at)
            if tokens == 8:
                store(at + d_at, twice_each(load_f32x8(d)))
            else:
                store(at + d_at, four_each(load_f32x4(d)))

    return inline(arrange_all)


def rows_unpacked(form: FewFormat) -> Inline:
    """16 rows' super-blocks, `row_bytes` apart, to `block`; eight rows of what lies `far` are asked for."""
    unpack, headers, lines = form.unpack, form.headers, -(-form.size // 64)

    def unpack_rows(weights: int, row_bytes: int, block: int, far: int) -> None:
        for four in unroll(4):
            p = registers(4)
            for i in unroll(4):
                p[i] = weights + (4 * four + i) * row_bytes
            d = block + D_ROWS + 16 * four
            headers(p[0], p[1], p[2], p[3], block + SCALES + 256 * four, block + MINIMA + 64 * four, d)
            for i in unroll(4):
                if i % 2 == 0:
                    prefetch_share(far + (2 * four + i // 2) * row_bytes, lines, 0, 1)
                unpack(p[i], block + CODES + 1024 * four + 256 * i)

    return inline(unpack_rows)


def values_added(form: FewFormat) -> Inline:
    """16 rows' products with a super-block of activations, times their scales, added to y; asks for four rows."""
    minima, total, lines, tokens, rows = form.minima, form.total, -(-form.size // 64), form.tokens, form.rows
    each, minima_at = 4 * form.width * form.rows, 256 // form.depth * 64 * form.width
    load_d = load_pair_in_all if rows == 2 else load_four_in_all
    evens_of, odds_of = (evens, odds) if form.width == 16 else (evens_of_four, odds_of_four)

    def add_values(products: int, block: int, y: int, dx: Vector, far: int, row_bytes: int) -> None:
        for i in unroll(tokens):
            if rows == 4 or i % 2 == 0:
                prefetch_share(far + (12 + rows * i // 4) * row_bytes, lines, 0, 1)
            at = products + each * i
            d = as_floats(load_d(block + D_ROWS + 4 * rows * i))
            value = mul(total(at, block + SCALES + 64 * rows * i), d)
            if minima:
                a, b = load_i32x16(at + minima_at), load_i32x16(at + minima_at + 64)
                least = ints_to_floats(add(evens_of(a, b), shift_left(odds_of(a, b), 7)))
                value = sub(value, mul(least, as_floats(load_d(block + DMIN_ROWS + 4 * rows * i))))
            store(y + 64 * i, fma(value, dx, load_floats(y + 64 * i)))

    return inline(add_values)


def rows_stored(form: FewFormat) -> Inline:
    """y to 16 places from `row` on of each token's output, plus the bias."""
    tokens, rows = form.tokens, form.rows

    def store_rows(args: int, row: int, y: int) -> None:
        out, bias = load_i64(args + OUT) + 4 * row, load_i64(args + BIAS)
        for t in range(load_i64(args + N_TOKENS)):
            for i in unroll(tokens):
                at = y + 64 * i + 4 * rows * t
                if rows == 2:
                    store_i64(out + 8 * i, load_i64(at))
                else:
                    store(out + 16 * i, load_i32x4(at))
            if bias:
                store(out, add(load_floats(out), load_floats(bias + 4 * row)))
            out += load_i64(args + OUT_STRIDE)

    return inline(store_rows)


@cache
def few_kernel(name: str, tokens: int) -> Kernel:
    """Kernel over units of 16 rows for a type and number of tokens in FORMATS; args as in matmul_args.py, one panel."""
    form = FORMATS[name, tokens]
    size, depth, minima, count, lines = form.size, form.depth, form.minima, 256 // form.depth, -(-form.size // 64)
    arrange_all, unpack_rows = activations_arranged(form), rows_unpacked(form)
    add_values, store_rows, width = values_added(form), rows_stored(form), form.width
    sums_at, d_at, x_bytes = x_places(width)

    def few(args: int, begin: int, end: int, scratch: int) -> None:
        row_bytes, n_rows, n_blocks = load_i64(args + ROW_BYTES), load_i64(args + N_ROWS), load_i64(args + N_BLOCKS)
        arrange_all(args, scratch + X)
        tiles_on(scratch, width)
        products = scratch + PRODUCTS
        for unit in range(begin, end, UNITS):
            first, some = unit * ROWS, min(end - unit, UNITS)
            weights = load_i64(args + WEIGHTS) + first * row_bytes
            for i in unroll(UNITS * tokens):
                store(scratch + Y + 64 * i, splat_floats(0.0))
            # Super-blocks of 16 rows are unpacked between the products of those before and the use of the products.
            b, u, x, y, before = 0, 0, 0, 0, 0
            for step in range(some * n_blocks + 1):
                block = scratch + step % 2 * BLOCK
                far = weights + u * ROWS * row_bytes + size * (b + AHEAD)
                if b + AHEAD >= n_blocks:  # of the units that follow
                    far += (some * ROWS - 1) * row_bytes
                if step > 0:
                    for i in unroll(count):
                        codes = before + CODES + depth * i
                        if count == 4 or i % 2 == 0:
                            prefetch_share(far + (8 + 4 * i // count) * row_bytes, lines, 0, 1)
                        tile_products(codes, 256, x + width * depth * i, products + 64 * width * i, depth, width)
                    if minima:
                        tile_products(before + MINIMA, 16, x + sums_at, products + 64 * width * count, 16, width)
                if b < n_blocks:
                    row = min(u * ROWS, n_rows - ROWS - first)
                    unpack_rows(weights + row * row_bytes + size * b, row_bytes, block, far)
                if step > 0:
                    add_values(products, before, y, load_floats(x + d_at), far, row_bytes)
                before, x, y = block, scratch + X + x_bytes * b, scratch + Y + 64 * tokens * u
                u += 1
                if u == some:
                    b, u = b + 1, 0
            for u in range(some):
                store_rows(args, min(first + u * ROWS, n_rows - ROWS), scratch + Y + 64 * tokens * u)
        tiles_off()

    return kernel(few, f"linear_{name}_few{tokens}")


def few_scratch(n_blocks: int) -> int:
    """Bytes of scratch a thread needs."""
    return X + x_places(16)[2] * n_blocks
