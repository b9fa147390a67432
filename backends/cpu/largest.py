"""The largest value of each row and where it is: all that a greedy choice needs of a row of logits.

Reading 128k logits back costs numpy half a millisecond for each token; here they are still in the caches of those who
made them. Threads find the largest value of each piece of a row, then one the position in the row.
"""

from __future__ import annotations

import numpy as np

from edgellm.backends.cpu.arena import Buf
from edgellm.backends.cpu.jit import kernel
from edgellm.backends.cpu.rows import pieces
from edgellm.backends.cpu.simd import (
    load_f32,
    load_f32x16,
    max_f32x16,
    maximum,
    select_less,
    splat_f32x16,
    store_f32,
)
from edgellm.backends.cpu.tape import Tape
from edgellm.backends.cpu.vecmath import ONE, ZERO, arg

__all__ = ["KERNELS", "record_largest"]

PIECE = 8192
INFINITE, NAN = np.float32(np.inf), np.float32(np.nan)


@kernel
def largest_of_pieces(args: int, begin: int, end: int, scratch: int) -> None:
    """A unit is one piece of one row: its largest value, NaN where it has a NaN or +inf.

    args: x, out, elements of a row, pieces of a row."""
    n, parts = arg(args, 2), arg(args, 3)
    infinite = splat_f32x16(INFINITE)
    for unit in range(begin, end):
        first = unit % parts * PIECE
        count = min(n - first, PIECE)
        x = arg(args, 0) + 4 * (unit // parts * n + first)
        whole = count // 16 * 16
        tops, wrongs = splat_f32x16(-INFINITE), splat_f32x16(ZERO)
        for i in range(0, whole, 16):
            v = load_f32x16(x + 4 * i)
            tops = maximum(v, tops)
            wrongs = maximum(wrongs, select_less(v, infinite, splat_f32x16(ZERO), splat_f32x16(ONE)))
        top, wrong = max_f32x16(tops), max_f32x16(wrongs)
        for i in range(whole, count):
            value = load_f32(x + 4 * i)
            if value < INFINITE:
                top = max(top, value)
            else:
                wrong = ONE
        store_f32(arg(args, 1) + 4 * unit, NAN if wrong > ZERO else top)


@kernel
def first_largest(args: int, begin: int, end: int, scratch: int) -> None:
    """A unit is a row: the largest of its pieces' values and its first position as a float32; NaN and 0 if one is NaN.

    args: x, values of the pieces, out, elements of a row, pieces of a row."""
    n, parts = arg(args, 3), arg(args, 4)
    for row in range(begin, end):
        values = arg(args, 1) + 4 * parts * row
        best = 0
        for p in range(parts):
            value = load_f32(values + 4 * p)
            if value > load_f32(values + 4 * best) or value != value:
                best = p
        top, x, at = load_f32(values + 4 * best), arg(args, 0) + 4 * n * row, 0
        if top == top:
            at = best * PIECE
            while load_f32(x + 4 * at) != top:
                at += 1
        store_f32(arg(args, 2) + 8 * row, top)
        store_f32(arg(args, 2) + 8 * row + 4, np.float32(at))


KERNELS = (largest_of_pieces, first_largest)


def record_largest(tape: Tape, x: Buf) -> Buf:
    """x (n, d): (n, 2)."""
    rows, n = x.shape
    parts = pieces(n, PIECE)
    values, out = tape.new(rows, parts), tape.new(rows, 2)
    tape.op(largest_of_pieces, rows * parts, (x, values, n, parts), reads=[x], writes=[values], step=0)
    tape.op(first_largest, rows, (x, values, out, n, parts), reads=[x, values], writes=[out])
    return out
