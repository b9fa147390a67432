"""Attention over the paged cache: one tile kernel for decode, drafts and prompts, the same bits in all of them.

Positions are cut into partitions of PARTITION, counted from position 0. Per row and partition p:

    m_p = max s,  l_p = sum exp(s - m_p),  a_p = sum exp(s - m_p) v       with s = softcap(scale * q.k)

and partitions are folded in rising order: (m, l, a) <- (M, l e^(m-M) + l_p e^(m_p-M), a e^(m-M) + a_p e^(m_p-M)), M =
max(m, m_p). A tile is some rows of one sequence times the query heads of one kv head: each K and V row is read once
for all of them. A unit of work is a tile with all its partitions (prompts, batches: folded as they come), or with one
partition (few rows, long context: its (m, l, a) goes to memory and `attention_combine` folds). Masked positions weigh
exactly 0, and sums run over fixed lanes, so neither the tile nor the split shows in the result.

Scratch per thread: q [rows][k_dim], s [rows][PARTITION], a_p and a [rows][v_dim padded to 16], m and l [rows].
"""

from __future__ import annotations

from functools import cache
from typing import Any

from edgellm.backends.cpu.attention_inner import (
    AHEAD,
    NEVER,
    columns_of,
    finish,
    fold,
    scores_loop,
    soften,
    values_loop,
    weigh,
)
from edgellm.backends.cpu.attention_plan import PARTITION, UNIT_FIELDS
from edgellm.backends.cpu.jit import Kernel, inline, kernel
from edgellm.backends.cpu.simd import (
    float_of_bits,
    load_f32,
    load_f32x8,
    load_f32x16,
    load_i32,
    load_i64,
    mul,
    splat_f32x8,
    splat_f32x16,
    store,
    store_f32,
)
from edgellm.backends.cpu.vecmath import ZERO, arg
from edgellm.config import BLOCK_SIZE

__all__ = ["attention_combine", "scratch_bytes", "tile_kernel"]


def scratch_bytes(k_dim: int, v_dim: int, rows: int) -> int:
    """Scratch of one thread for tiles of up to `rows` rows times heads."""
    padded = -(-v_dim // 16) * 16
    return 4 * rows * (k_dim + PARTITION + 2 * padded + 4) + 1024


def _gather(k_dim: int, group: int) -> Any:
    def gather(args: int, first_row: int, n_rows: int, head: int, q: int, pairs: int) -> None:
        """Scaled queries of the tile, row by row and head by head; zeros up to a multiple of `rows`."""
        scale = float_of_bits(arg(args, 14))
        for i in range(n_rows):
            source = arg(args, 0) + 4 * k_dim * ((first_row + i) * arg(args, 13) + head * group)
            target = q + 4 * k_dim * group * i
            for d in range(0, k_dim * group // 8 * 8, 8):
                store(target + 4 * d, mul(load_f32x8(source + 4 * d), splat_f32x8(scale)))
            for d in range(k_dim * group // 8 * 8, k_dim * group):
                store_f32(target + 4 * d, load_f32(source + 4 * d) * scale)
        for d in range(k_dim * group * n_rows, k_dim * pairs):
            store_f32(q + 4 * d, ZERO)

    return inline(gather)


@inline
def _table(args: int, unit: int, p: int) -> int:
    """Where a partition's part of its sequence's block table is."""
    return arg(args, 5) + 4 * (arg(args, 6) * load_i64(unit + 24) + p * (PARTITION // BLOCK_SIZE))


@inline
def _head(args: int, unit: int) -> int:
    """K of a unit's head in block 0."""
    return arg(args, 7) + arg(args, 9) * load_i64(unit + 16)


def _partition(kv_type: str, k_dim: int, v_dim: int, group: int, rows: int) -> Any:
    padded = -(-v_dim // 16) * 16
    columns = columns_of(v_dim, rows)
    scores, values = scores_loop(kv_type, k_dim, rows), values_loop(kv_type, v_dim, rows, columns)

    def partition(
        args: int, unit: int, p: int, next_table: int, next_k: int, q: int, s: int, a: int, m: int, l: int
    ) -> None:
        """(m, l, a) of partition p for every pair of the tile. `next_table`, `next_k`: what is read after it."""
        first_row, n_rows, sequence = load_i64(unit), load_i64(unit + 8), load_i64(unit + 24)
        start = p * PARTITION
        window, causal = arg(args, 16), arg(args, 18)
        context = load_i32(arg(args, 19) + 4 * sequence)
        low_all, high_all = 0, context - start
        last = load_i32(arg(args, 4) + 4 * (first_row + n_rows - 1)) - start
        if causal != 0:
            high_all = last + 1
        elif window != 0:
            high_all = min(high_all, last + window)
        if window != 0:
            low_all = max(load_i32(arg(args, 4) + 4 * first_row) - window + 1 - start, 0)
        high_all = min(high_all, PARTITION)
        first_block = low_all // BLOCK_SIZE
        n = (high_all + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
        table, base = _table(args, unit, p), _head(args, unit)
        pairs = n_rows * group
        for block in range(first_block, n // BLOCK_SIZE):
            k = base + arg(args, 8) * load_i32(table + 4 * block)
            # What is needed AHEAD blocks later: K, then the first V.
            later = block + AHEAD
            ahead = k
            if later < n // BLOCK_SIZE:
                ahead = base + arg(args, 8) * load_i32(table + 4 * later)
            elif later - n // BLOCK_SIZE + first_block < n // BLOCK_SIZE:
                later = later - n // BLOCK_SIZE + first_block
                ahead = base + arg(args, 8) * load_i32(table + 4 * later) + arg(args, 10)
            for r in range(0, pairs, rows):
                at = s + 4 * (PARTITION * r + BLOCK_SIZE * block)
                scores(k, q + 4 * k_dim * r, at, k + arg(args, 11), ahead)
        first = first_block * BLOCK_SIZE
        cap = float_of_bits(arg(args, 15))
        for i in range(n_rows):
            low, high = 0, high_all
            position = load_i32(arg(args, 4) + 4 * (first_row + i)) - start
            if causal != 0:
                high = min(position + 1, high_all)
            elif window != 0:
                high = min(position + window, high_all)
            if window != 0:
                low = position - window + 1
            for g in range(group):
                r = i * group + g
                if cap > ZERO:
                    soften(s + 4 * (PARTITION * r + first), n - first, cap)
                weigh(s + 4 * PARTITION * r, first, low, high, n, m + 4 * r, l + 4 * r)
        for r in range(0, pairs, rows):
            for dim in range(0, padded, 16 * columns):
                values(
                    table, base + arg(args, 10), arg(args, 8), arg(args, 12), s + 4 * PARTITION * r, low_all, high_all,
                    next_table, next_k, a + 4 * padded * r, dim,
                )  # fmt: skip

    return inline(partition)


@cache
def tile_kernel(kv_type: str, k_dim: int, v_dim: int, group: int, rows: int) -> Kernel:
    """Attention of tiles, `rows` (row, head) pairs in registers at once.

    args: 0 q, 1 out, 2 units, 3 cell with the address of the partials, 4 positions, 5 block table, 6 its width,
    7 pages, 8 bytes from block to block, 9 head bytes, 10 V offset, 11 K scales, 12 V scales less V offset,
    13 n_heads, 14 scale, 15 softcap, 16 window, 17 sinks, 18 causal, 19 context lengths.
    A unit's fields: first row, rows, kv head, sequence, first and last partition, partial's slot or -1.
    """
    padded = -(-v_dim // 16) * 16
    gathered, one_partition = _gather(k_dim, group), _partition(kv_type, k_dim, v_dim, group, rows)

    def attend(args: int, begin: int, end: int, scratch: int) -> None:
        for u in range(begin, end):
            unit = arg(args, 2) + 8 * UNIT_FIELDS * u
            first_row, n_rows, head = load_i64(unit), load_i64(unit + 8), load_i64(unit + 16)
            pairs = n_rows * group
            whole = (pairs + rows - 1) // rows * rows
            q = scratch
            s = q + 4 * k_dim * whole
            a_part = s + 4 * PARTITION * whole
            a = a_part + 4 * padded * whole
            m_part = a + 4 * padded * whole
            l_part, m, l = m_part + 4 * whole, m_part + 8 * whole, m_part + 12 * whole
            gathered(args, first_row, n_rows, head, q, whole)
            for j in range(PARTITION * pairs, PARTITION * whole):
                store_f32(s + 4 * j, ZERO)
            for r in range(pairs):
                store_f32(m + 4 * r, NEVER)
                store_f32(l + 4 * r, ZERO)
            for j in range(0, padded * pairs, 16):
                store(a + 4 * j, splat_f32x16(ZERO))
            slot, last = load_i64(unit + 48), load_i64(unit + 40)
            if slot >= 0:
                last = load_i64(unit + 32) + 1
            for p in range(load_i64(unit + 32), last):
                next_unit, next_p = unit, p + 1
                if next_p >= last:
                    next_unit = unit + 8 * UNIT_FIELDS
                next_table, next_k = 0, 0
                if next_p < last or u + 1 < end:
                    if next_p >= last:
                        next_p = load_i64(next_unit + 32)
                    next_table, next_k = _table(args, next_unit, next_p), _head(args, next_unit)
                one_partition(args, unit, p, next_table, next_k, q, s, a_part, m_part, l_part)
                if slot < 0:
                    for r in range(pairs):
                        at = 4 * padded * r
                        fold(m + 4 * r, l + 4 * r, a + at, m_part + 4 * r, l_part + 4 * r, a_part + at, padded)
            if slot >= 0:
                to = load_i64(arg(args, 3)) + 4 * slot * (padded + 2)
                for j in range(0, padded * pairs, 16):
                    store(to + 4 * j, load_f32x16(a_part + 4 * j))
                for r in range(pairs):
                    store_f32(to + 4 * (padded * pairs + r), load_f32(m_part + 4 * r))
                    store_f32(to + 4 * (padded * pairs + pairs + r), load_f32(l_part + 4 * r))
            else:
                for i in range(n_rows):
                    for g in range(group):
                        r = i * group + g
                        h = head * group + g
                        out = arg(args, 1) + 4 * v_dim * ((first_row + i) * arg(args, 13) + h)
                        finish(m + 4 * r, l + 4 * r, a + 4 * padded * r, out, v_dim, arg(args, 17), h)

    return kernel(attend, f"attention_{kv_type}_{k_dim}_{v_dim}_{group}_{rows}")


@kernel
def attention_combine(args: int, begin: int, end: int, scratch: int) -> None:
    """Fold the partials of split tiles. A unit is one (row, head) of a tile.

    args: 0 out, 1 units, 2 cell with the address of the partials, 3 n_heads, 4 v_dim, 5 group, 6 sinks.
    A unit's fields: row of the batch, query head, first slot, partitions, pairs of the tile, pair, -, -.
    """
    v_dim = arg(args, 4)
    padded = (v_dim + 15) // 16 * 16
    a, m, l = scratch, scratch + 4 * padded, scratch + 4 * padded + 4
    for u in range(begin, end):
        unit = arg(args, 1) + 8 * UNIT_FIELDS * u
        pairs, pair = load_i64(unit + 32), load_i64(unit + 40)
        store_f32(m, NEVER)
        store_f32(l, ZERO)
        for j in range(0, padded, 16):
            store(a + 4 * j, splat_f32x16(ZERO))
        for p in range(load_i64(unit + 24)):
            part = load_i64(arg(args, 2)) + 4 * (load_i64(unit + 16) + p * pairs) * (padded + 2)
            m_part = part + 4 * padded * pairs + 4 * pair
            fold(m, l, a, m_part, m_part + 4 * pairs, part + 4 * padded * pair, padded)
        h = load_i64(unit + 8)
        out = arg(args, 0) + 4 * v_dim * (load_i64(unit) * arg(args, 3) + h)
        finish(m, l, a, out, v_dim, arg(args, 6), h)
