"""Inner loops of attention: scores of one block, weights of one row, weighted sums of V, folding of partial results.

Everything here works on scratch memory by address; attention.py says what is computed and in which order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.backends.cpu.attention_plan import PARTITION
from edgellm.backends.cpu.jit import inline
from edgellm.backends.cpu.kv import GROUP
from edgellm.backends.cpu.simd import (
    ISA,
    Op,
    add,
    fma,
    lane_f32x8,
    load_f16,
    load_f16x16,
    load_f32,
    load_f32x8,
    load_f32x16,
    load_i8x16_as_f32x16,
    load_i32,
    max_f32x16,
    maximum,
    mul,
    prefetch_near,
    registers,
    splat_f32x8,
    splat_f32x16,
    store,
    store_f32,
    sub,
    sum_f32x16,
    unroll,
)
from edgellm.backends.cpu.vecmath import ONE, ZERO, exp8, exp16, tanh8
from edgellm.config import BLOCK_SIZE

NEVER = np.float32(-1e30)
"""Score of a masked position, and the maximum of a row that sees nothing."""
BARELY = np.float32(-1e29)
ROWS_AT_ONCE = 12 if ISA == "avx512" else 3
"""Rows whose sums are kept in registers for prompts: each row takes two f32x16."""
REGISTERS = 24 if ISA in ("avx512", "neon") else 12
AHEAD = 2
"""Blocks between a prefetch and its use."""
HALVES = 1 if ISA == "avx512" else 4 if ISA in ("neon", "scalar") else 2
"""Machine registers of one f32x16."""
ITEM = {"f32": 4, "f16": 2, "q8_0": 1}
LOADS: dict[str, Op] = {"f32": load_f32x16, "f16": load_f16x16, "q8_0": load_i8x16_as_f32x16}


@inline
def _exp(x: np.float32) -> np.float32:
    return lane_f32x8(exp8(splat_f32x8(x)), 0)


def scores_loop(kv_type: str, k_dim: int, rows: int) -> Any:
    """s[r][0..32) = q[r].K for one block and `rows` rows: lanes are positions, dimensions are added in order."""
    item, load = ITEM[kv_type], LOADS[kv_type]
    scaled = kv_type == "q8_0"

    def scores(k: int, q: int, out: int, scales: int, ahead: int) -> None:
        low, high = registers(rows), registers(rows)
        for r in unroll(rows):
            low[r] = splat_f32x16(ZERO)
            high[r] = splat_f32x16(ZERO)
        for d in range(k_dim):
            prefetch_near(ahead + BLOCK_SIZE * item * d)
            if kv_type == "f32":
                prefetch_near(ahead + BLOCK_SIZE * item * d + 64)
            k0, k1 = load(k + BLOCK_SIZE * item * d), load(k + BLOCK_SIZE * item * d + 16 * item)
            if scaled:
                at = scales + 2 * BLOCK_SIZE * (d // GROUP)
                k0, k1 = mul(k0, load_f16x16(at)), mul(k1, load_f16x16(at + 32))
            for r in unroll(rows):
                x = splat_f32x16(load_f32(q + 4 * (k_dim * r + d)))
                low[r] = fma(k0, x, low[r])
                high[r] = fma(k1, x, high[r])
        for r in unroll(rows):
            store(out + 4 * PARTITION * r, low[r])
            store(out + 4 * PARTITION * r + 64, high[r])

    return inline(scores)


@inline
def soften(s: int, n: int, cap: np.float32) -> None:
    """s = cap * tanh(s / cap) over n scores (n a multiple of 32)."""
    caps, inverse = splat_f32x8(cap), splat_f32x8(ONE / cap)
    for j in range(0, n, 8):
        store(s + 4 * j, mul(caps, tanh8(mul(load_f32x8(s + 4 * j), inverse))))


@inline
def weigh(s: int, first: int, low: int, high: int, n: int, m_out: int, l_out: int) -> None:
    """Scores [first, n) of one row -> exp(s - max) in place, 0 outside [low, high); writes max and sum."""
    for j in range(first, min(low, n)):
        store_f32(s + 4 * j, NEVER)
    for j in range(max(high, first), n):
        store_f32(s + 4 * j, NEVER)
    largest = splat_f32x16(NEVER)
    for j in range(first, n, 16):
        largest = maximum(largest, load_f32x16(s + 4 * j))
    top = max_f32x16(largest)
    total = splat_f32x16(ZERO)
    tops = splat_f32x16(top)
    for j in range(first, n, 16):
        e = exp16(sub(load_f32x16(s + 4 * j), tops))
        store(s + 4 * j, e)
        total = add(total, e)
    store_f32(m_out, top)
    store_f32(l_out, sum_f32x16(total))


def columns_of(v_dim: int, rows: int) -> int:
    """f32x16 columns of V that `rows` rows keep in registers at once: a divisor of the padded width."""
    width = -(-v_dim // 16)
    return max(c for c in range(1, width + 1) if width % c == 0 and (c == 1 or c * rows * HALVES <= REGISTERS))


def values_loop(kv_type: str, v_dim: int, rows: int, columns: int) -> Any:
    """a[r][16 * columns dims] += sum over the block's positions [first, last) of s[r][j] V[j]."""
    item, load = ITEM[kv_type], LOADS[kv_type]
    groups = -(-v_dim // GROUP)
    scaled = kv_type == "q8_0"
    padded = -(-v_dim // 16) * 16

    def values(
        table: int, blocks: int, stride: int, scales: int, s: int, first: int, last: int, next_table: int, next_k: int,
        out: int, dim: int,
    ) -> None:  # fmt: skip
        """`table`: this partition's part of the block table (int32); `blocks`: V of this head in block 0; `next_table`
        and `next_k`: the same for the K that is read after this."""
        acc = registers(rows * columns)
        for i in unroll(rows * columns):
            acc[i] = splat_f32x16(ZERO)
        end = (last + BLOCK_SIZE - 1) // BLOCK_SIZE
        for block in range(first // BLOCK_SIZE, end):
            base = blocks + stride * load_i32(table + 4 * block)
            later = block + AHEAD
            ahead = base
            if later < end:
                ahead = blocks + stride * load_i32(table + 4 * later)
            elif next_table != 0:
                ahead = next_k + stride * load_i32(next_table + 4 * (later - end))
            start = block * BLOCK_SIZE
            for j in range(max(first, start), min(last, start + BLOCK_SIZE)):
                v = base + item * (v_dim * (j - start) + dim)
                for line in unroll((v_dim * item + 63) // 64):
                    prefetch_near(ahead + item * v_dim * (j - start) + 64 * line)
                value = registers(columns)
                for c in unroll(columns):
                    value[c] = load(v + 16 * item * c)
                    if scaled:
                        at = base + scales + 2 * (groups * (j - start) + (dim + 16 * c) // GROUP)
                        value[c] = mul(value[c], splat_f32x16(load_f16(at)))
                for r in unroll(rows):
                    x = splat_f32x16(load_f32(s + 4 * (PARTITION * r + j)))
                    for c in unroll(columns):
                        acc[r * columns + c] = fma(value[c], x, acc[r * columns + c])
        for r in unroll(rows):
            for c in unroll(columns):
                store(out + 4 * (padded * r + dim + 16 * c), acc[r * columns + c])

    return inline(values)


@inline
def fold(m: int, l: int, a: int, m_part: int, l_part: int, a_part: int, padded: int) -> None:
    """Fold one row's partition (…_part: addresses) into its running (m, l, a)."""
    new, old = load_f32(m_part), load_f32(m)
    if new > BARELY:
        top = max(new, old)
        keep, take = _exp(old - top), _exp(new - top)
        store_f32(m, top)
        store_f32(l, load_f32(l) * keep + load_f32(l_part) * take)
        keeps, takes = splat_f32x16(keep), splat_f32x16(take)
        for d in range(0, padded, 16):
            kept = mul(load_f32x16(a + 4 * d), keeps)
            store(a + 4 * d, fma(load_f32x16(a_part + 4 * d), takes, kept))


@inline
def finish(m: int, l: int, a: int, out: int, v_dim: int, sinks: int, head: int) -> None:
    """out = a / l, the head's sink counted in l."""
    total, factor = load_f32(l), ONE
    if sinks != 0:
        sink, old = load_f32(sinks + 4 * head), load_f32(m)
        top = max(sink, old)
        factor = _exp(old - top)
        total = total * factor + _exp(sink - top)
    factor = factor / total
    factors = splat_f32x8(factor)
    for d in range(0, v_dim // 8 * 8, 8):
        store(out + 4 * d, mul(load_f32x8(a + 4 * d), factors))
    for d in range(v_dim // 8 * 8, v_dim):
        store_f32(out + 4 * d, load_f32(a + 4 * d) * factor)
