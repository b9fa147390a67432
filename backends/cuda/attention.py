"""Paged attention: partitions of equal length from position 0, then joined in rising order.

    s = softcap(scale q.k); m = max s; out = sum exp(s - m) v / (sum exp(s - m) + exp(sink - m))
Cache rows lie per slot: k[slot, kv head, D], slot = table[seq, position // BS] * BS + position % BS.

partial  a warp per (partition, query heads of one kv head, row): lane l holds dimensions l, l + 32, ... of K, V and of
         up to `heads_per_warp` query heads, so each K and V row is read once for them, neighbouring lanes reading
         neighbouring values. A group with more query heads takes several warps, which find the row in the L2 cache.
combine  one thread per output value.
Prompts take the same kernels, a warp per row. Twin: `edgellm.backends.reference`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda, types

from edgellm.backends.cuda.device import warp_sum

__all__ = ["combine_partitions", "heads_per_warp", "make_partial", "partition_length"]

f32 = types.float32
PARTITION, MOST_PARTITIONS = 32, 256
FEW_ROWS = 8
LOWEST = -3.0e38


def partition_length(rows: int, context: int) -> int:
    """Positions per partition. Few rows need short ones to keep all cores busy; a prompt's rows do so by themselves,
    and partitions would cost them memory."""
    if rows > FEW_ROWS:
        return context
    return PARTITION * max(1, -(-context // (PARTITION * MOST_PARTITIONS)))


def heads_per_warp(group: int, dim: int) -> int:
    """Query heads of a group that one warp holds: a divisor of `group` that keeps q and sums in registers."""
    most = max(1, 512 // dim)
    return max(n for n in range(1, group + 1) if group % n == 0 and n <= most)


def make_partial(dim: int, v_dim: int, group: int, size: int, quantised: bool) -> Callable[..., Any]:
    """Kernel for `group` query heads per warp and blocks of `size` positions; `quantised`: int8 rows with a float16
    scale per 32. Grid: (partitions, query heads / group, rows); `share` warps in a row read the same kv head."""
    wide, v_wide = (dim + 31) // 32, (v_dim + 31) // 32

    @cuda.jit
    def partial(
        q, k, v, ks, vs, table, width, positions, seqs, lens, length, share, window, causal, factor, cap, sums, stats
    ):
        lane = cuda.threadIdx.x
        partition, row = cuda.blockIdx.x, cuda.blockIdx.z
        partitions, head, kv_heads = cuda.gridDim.x, cuda.blockIdx.y // share, cuda.gridDim.y // share
        query = cuda.local.array((group, wide), types.float32)
        total_v = cuda.local.array((group, v_wide), types.float32)
        top = cuda.local.array(group, types.float32)
        total = cuda.local.array(group, types.float32)
        kr = cuda.local.array(wide, types.float32)
        vr = cuda.local.array(v_wide, types.float32)
        first_head = (row * cuda.gridDim.y + cuda.blockIdx.y) * group
        for g in range(group):
            top[g], total[g] = f32(LOWEST), f32(0.0)
            for j in range(wide):
                e = lane + 32 * j
                query[g, j] = factor * q[(first_head + g) * dim + e] if e < dim else f32(0.0)
            for j in range(v_wide):
                total_v[g, j] = f32(0.0)
        last = positions[row] if causal else lens[seqs[row]] - 1
        start = partition * length
        if window > 0:
            start = max(start, positions[row] - window + 1)
            if not causal:
                last = min(last, positions[row] + window - 1)
        stop = min((partition + 1) * length - 1, last)
        for p in range(start, stop + 1):
            at = (table[seqs[row] * width + p // size] * size + p % size) * kv_heads + head
            for j in range(wide):
                e = lane + 32 * j
                kr[j] = f32(k[at * dim + e]) if e < dim else f32(0.0)
                if quantised:
                    kr[j] *= f32(ks[at * (dim // 32) + j])
            for j in range(v_wide):
                e = lane + 32 * j
                vr[j] = f32(v[at * v_dim + e]) if e < v_dim else f32(0.0)
                if quantised:
                    vr[j] *= f32(vs[at * (v_dim // 32) + j])
            for g in range(group):
                part = f32(0.0)
                for j in range(wide):
                    part += query[g, j] * kr[j]
                score = warp_sum(part)
                if cap > f32(0.0):
                    score = cap * math.tanh(score / cap)
                higher = max(top[g], score)
                keep, weight = math.exp(top[g] - higher), math.exp(score - higher)
                total[g] = total[g] * keep + weight
                for j in range(v_wide):
                    total_v[g, j] = total_v[g, j] * keep + weight * vr[j]
                top[g] = higher
        for g in range(group):
            out = (first_head + g) * partitions + partition
            for j in range(v_wide):
                e = lane + 32 * j
                if e < v_dim:
                    sums[out * v_dim + e] = total_v[g, j]
            if lane == 0:
                stats[2 * out] = top[g]
                stats[2 * out + 1] = total[g]

    return partial


@cuda.jit
def combine_partitions(sums, stats, sinks, out, heads, partitions, v_dim, total):
    """out[row, head, e]; `sinks` empty or one logit per head."""
    i = cuda.grid(1)
    if i >= total:
        return
    e, rh = i % v_dim, i // v_dim
    has_sink = sinks.size > 0
    top = sinks[rh % heads] if has_sink else f32(LOWEST)
    for p in range(partitions):
        top = max(top, stats[2 * (rh * partitions + p)])
    value, norm = f32(0.0), math.exp(sinks[rh % heads] - top) if has_sink else f32(0.0)
    for p in range(partitions):
        at = rh * partitions + p
        weight = math.exp(stats[2 * at] - top)
        norm += weight * stats[2 * at + 1]
        value += weight * sums[at * v_dim + e]
    out[i] = value / norm
