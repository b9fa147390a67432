"""Mixtures of experts: routing, products that read only the chosen experts' rows, and the weighted sum.

A pair is (row of x, slot of its choice), numbered row * n_used + slot. With few pairs an expert, each pair goes through
the row kernel of its expert's weights. With many, pairs are grouped by expert and each group goes through the tile
kernel, so that an expert's weights are read once. Both give the same bits as `linear` with that expert's matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from edgellm.backends.base import RouteSpec
from edgellm.backends.cpu import matmul_args
from edgellm.backends.cpu.arena import Buf
from edgellm.backends.cpu.jit import Kernel, inline, kernel
from edgellm.backends.cpu.matmul import K_FORMATS, QUANTISED, linear_kernel, quantised, scratch_bytes, units_of
from edgellm.backends.cpu.matmul_args import BIAS, N_BLOCKS, N_TOKENS, ORDER, OUT, SUMS, WEIGHTS, D, Q
from edgellm.backends.cpu.matmul_float import KERNELS, UNIT
from edgellm.backends.cpu.quantise import Layout, quantise_ordered_kernel
from edgellm.backends.cpu.simd import (
    float_of_bits,
    fma,
    load_f32,
    load_f32x8,
    load_i32,
    load_i64,
    mul,
    splat_f32x8,
    store,
    store_f32,
    store_i32,
    store_i64,
)
from edgellm.backends.cpu.simd_pack import first_lane_f32x8
from edgellm.backends.cpu.simd_wide import LANES
from edgellm.backends.cpu.tape import Tape
from edgellm.backends.cpu.vecmath import ZERO, arg, exp8, load_part, sigmoid8, store_part
from edgellm.quants import QUANT_TABLE, GGMLType, QTensor

__all__ = ["all_expert_kernels", "record_combine", "record_expert_linear", "record_route"]

PANEL = 8
SCORINGS = ("softmax", "softmax_topk", "sigmoid")
LOWEST = np.float32(-3.4e38)


@inline
def exp_f32(x: np.float32) -> np.float32:
    """e^x."""
    return first_lane_f32x8(exp8(splat_f32x8(x)))


@inline
def softmax_in_place(x: int, n: int) -> None:
    """n floats become probabilities; summed from left to right."""
    top = load_f32(x)
    for i in range(1, n):
        top = max(top, load_f32(x + 4 * i))
    total = ZERO
    for i in range(n):
        e = exp_f32(load_f32(x + 4 * i) - top)
        store_f32(x + 4 * i, e)
        total += e
    for i in range(n):
        store_f32(x + 4 * i, load_f32(x + 4 * i) / total)


@inline
def drop_groups(ranked: int, n: int, groups: int, used: int, worth: int, single: bool) -> None:
    """All but the `used` best of equal groups get the lowest rank. `worth`: room for a float per group; `single`: its
    highest score counts alone, not the sum of two."""
    size = n // groups
    for g in range(groups):
        first, second = LOWEST, LOWEST
        for i in range(g * size, (g + 1) * size):
            score = load_f32(ranked + 4 * i)
            if score > first:
                first, second = score, first
            elif score > second:
                second = score
        store_f32(worth + 4 * g, first if single else first + second)
    for _ in range(groups - used):
        worst = 0
        for g in range(1, groups):
            if load_f32(worth + 4 * g) <= load_f32(worth + 4 * worst):
                worst = g
        store_f32(worth + 4 * worst, -LOWEST)
        for i in range(worst * size, (worst + 1) * size):
            store_f32(ranked + 4 * i, LOWEST)


@cache
def route_kernel(scoring: str, normalise: bool) -> Kernel:
    """Kernel over rows; ties: lowest index. args: scores, bias or 0, ids, weights, n_experts, n_used, scale, n_groups,
    n_groups_used."""

    def route(args: int, begin: int, end: int, scratch: int) -> None:
        n, used, bias = arg(args, 4), arg(args, 5), arg(args, 1)
        ranked = scratch + 4 * n
        for row in range(begin, end):
            scores, ids, weights = (
                arg(args, 0) + 4 * n * row,
                arg(args, 2) + 4 * used * row,
                arg(args, 3) + 4 * used * row,
            )
            for i in range(n):
                score = load_f32(scores + 4 * i)
                if scoring == "sigmoid":
                    score = first_lane_f32x8(sigmoid8(splat_f32x8(score)))
                store_f32(scratch + 4 * i, score)
            if scoring == "softmax":
                softmax_in_place(scratch, n)
            for i in range(n):
                score = load_f32(scratch + 4 * i)
                if bias != 0:
                    score += load_f32(bias + 4 * i)
                store_f32(ranked + 4 * i, score)
            if arg(args, 7) > 1:
                drop_groups(ranked, n, arg(args, 7), arg(args, 8), ranked + 4 * n, scoring == "softmax")
            for j in range(used):
                best = 0
                for i in range(1, n):
                    if load_f32(ranked + 4 * i) > load_f32(ranked + 4 * best):
                        best = i
                store_f32(ranked + 4 * best, LOWEST)
                store_i32(ids + 4 * j, best)
                store_f32(weights + 4 * j, load_f32(scratch + 4 * best))
            if scoring == "softmax_topk":
                softmax_in_place(weights, used)
            if normalise:
                total = ZERO
                for j in range(used):
                    total += load_f32(weights + 4 * j)
                for j in range(used):
                    store_f32(weights + 4 * j, load_f32(weights + 4 * j) / total)
            for j in range(used):
                store_f32(weights + 4 * j, load_f32(weights + 4 * j) * float_of_bits(arg(args, 6)))

    return kernel(route, f"route_{scoring}_{int(normalise)}")


def record_route(tape: Tape, scores: Buf, spec: RouteSpec, bias: Any) -> tuple[Buf, Buf]:
    """Scores (n, n_experts) -> ids, int32 (n, n_used), and weights, float32 (n, n_used)."""
    n, n_experts = scores.shape
    ids, weights = tape.new(n, spec.n_used), tape.new(n, spec.n_used)
    groups = spec.n_groups, spec.n_groups_used
    args = (scores, 0 if bias is None else bias, ids, weights, n_experts, spec.n_used, float(spec.scale), *groups)
    kernel_ = route_kernel(spec.scoring, spec.normalise)
    tape.op(kernel_, n, args, reads=[scores], writes=[ids, weights], scratch=8 * n_experts + 4 * spec.n_groups)
    return ids, weights


@kernel
def group_by_expert(args: int, begin: int, end: int, scratch: int) -> None:
    """One unit: places for all pairs, each expert's from the start of a panel on.

    args: ids, n_pairs, n_experts, counts, first panels, order (pair of each place, -1 for none), n_places."""
    ids, n_pairs, n_experts = arg(args, 0), arg(args, 1), arg(args, 2)
    counts, firsts, order = arg(args, 3), arg(args, 4), arg(args, 5)
    for e in range(n_experts):
        store_i32(counts + 4 * e, 0)
    for i in range(arg(args, 6)):
        store_i32(order + 4 * i, -1)
    for i in range(n_pairs):
        e = load_i32(ids + 4 * i)
        store_i32(counts + 4 * e, load_i32(counts + 4 * e) + 1)
    panel = 0
    for e in range(n_experts):
        store_i32(firsts + 4 * e, panel)
        panel += (load_i32(counts + 4 * e) + PANEL - 1) // PANEL
        store_i32(counts + 4 * e, 0)
    for i in range(n_pairs):
        e = load_i32(ids + 4 * i)
        place = load_i32(counts + 4 * e)
        store_i32(order + 4 * (load_i32(firsts + 4 * e) * PANEL + place), i)
        store_i32(counts + 4 * e, place + 1)


EXTRA = 8 * matmul_args.COUNT
"""Where an expert kernel's own arguments begin, behind a copy of the product's."""
OWN_ARGS = 128
"""Bytes of scratch for the arguments of one product."""


@inline
def copy_args(args: int, target: int) -> None:
    """The product's arguments."""
    for i in range(matmul_args.COUNT):
        store_i64(target + 8 * i, load_i64(args + 8 * i))


@cache
def pair_kernel(kind: str, block: int) -> Kernel:
    """Kernel over (pair, unit of rows). Extra args: ids, bytes of an expert, units an expert, share (pairs a row of x),
    bytes of bias an expert, bytes of a row of the output."""
    rows = inline(linear_kernel(kind, 1).function)
    sums_bytes = 32 if block == 256 else 4

    def pairs(args: int, begin: int, end: int, scratch: int) -> None:
        own, extra = scratch, args + EXTRA
        copy_args(args, own)
        units = arg(extra, 2)
        for work in range(begin, end):
            pair, unit = work // units, work % units
            expert, row = load_i32(arg(extra, 0) + 4 * pair), pair // arg(extra, 3)
            store_i64(own + WEIGHTS, load_i64(args + WEIGHTS) + expert * arg(extra, 1))
            at = row * load_i64(args + N_BLOCKS)
            store_i64(own + Q, load_i64(args + Q) + at * block)
            store_i64(own + SUMS, load_i64(args + SUMS) + at * sums_bytes)
            store_i64(own + D, load_i64(args + D) + at * 4)
            store_i64(own + OUT, load_i64(args + OUT) + pair * arg(extra, 5))
            if load_i64(args + BIAS) != 0:
                store_i64(own + BIAS, load_i64(args + BIAS) + expert * arg(extra, 4))
            rows(own, unit, unit + 1, scratch + OWN_ARGS)

    return kernel(pairs, f"experts_{kind.lower()}_pairs")


@cache
def group_kernel(kind: str, block: int) -> Kernel:
    """Kernel over (expert, unit of rows). Extra args: counts, bytes of an expert, units an expert, first panels, bytes
    of bias an expert."""
    tile = inline(linear_kernel(kind, PANEL).function)
    sums_bytes = 32 if block == 256 else 4

    def groups(args: int, begin: int, end: int, scratch: int) -> None:
        own, extra = scratch, args + EXTRA
        copy_args(args, own)
        units = arg(extra, 2)
        for work in range(begin, end):
            expert, unit = work // units, work % units
            count, place = load_i32(arg(extra, 0) + 4 * expert), load_i32(arg(extra, 3) + 4 * expert) * PANEL
            if count > 0:
                store_i64(own + WEIGHTS, load_i64(args + WEIGHTS) + expert * arg(extra, 1))
                store_i64(own + Q, load_i64(args + Q) + place * block)
                store_i64(own + SUMS, load_i64(args + SUMS) + place * sums_bytes)
                store_i64(own + D, load_i64(args + D) + place * 4)
                store_i64(own + N_TOKENS, count)
                store_i64(own + ORDER, load_i64(args + ORDER) + place * 4)
                if load_i64(args + BIAS) != 0:
                    store_i64(own + BIAS, load_i64(args + BIAS) + expert * arg(extra, 4))
                tile(own, unit, unit + 1, scratch + OWN_ARGS)

    return kernel(groups, f"experts_{kind.lower()}_groups")


@cache
def float_pair_kernel(kind: str) -> Kernel:
    """As `pair_kernel` for float weights. args: those of the float product, then ids, bytes of an expert, units an
    expert, share, experts' bias stride, bytes of a row of x, bytes of a row of the output."""
    rows = inline(KERNELS[kind].function)

    def pairs(args: int, begin: int, end: int, scratch: int) -> None:
        own, extra = scratch, args + 56
        for i in range(7):
            store_i64(own + 8 * i, arg(args, i))
        units = arg(extra, 2)
        for work in range(begin, end):
            pair, unit = work // units, work % units
            expert = load_i32(arg(extra, 0) + 4 * pair)
            store_i64(own, arg(args, 0) + pair // arg(extra, 3) * arg(extra, 5))
            store_i64(own + 8, arg(args, 1) + expert * arg(extra, 1))
            if arg(args, 2) != 0:
                store_i64(own + 16, arg(args, 2) + expert * arg(extra, 4))
            store_i64(own + 24, arg(args, 3) + pair * arg(extra, 6))
            rows(own, unit, unit + 1, scratch + OWN_ARGS)

    return kernel(pairs, f"experts_{kind.lower()}_pairs")


@dataclass(frozen=True)
class Groups:
    """Pairs grouped by expert; made once for each choice of experts."""

    n_panels: int
    counts: Buf
    firsts: Buf
    order: Buf


def _groups(tape: Tape, ids: Buf, n_experts: int) -> Groups:
    if "groups" not in ids.derived:
        n_panels = ids.size // PANEL + min(n_experts, ids.size)
        made = Groups(n_panels, tape.new(n_experts), tape.new(n_experts), tape.new(n_panels * PANEL))
        buffers = (made.counts, made.firsts, made.order)
        args = (ids, ids.size, n_experts, *buffers, n_panels * PANEL)
        tape.op(group_by_expert, 1, args, reads=[ids], writes=buffers)
        ids.derived["groups"] = made
    return ids.derived["groups"]


def record_expert_linear(tape: Tape, x: Buf, weight: QTensor, ids: Buf, bias: Any) -> Buf:
    """x (n, k) or (n, n_used, k), weight (n_experts, m, k), ids (n, n_used), bias (n_experts, m): (n, n_used, m)."""
    (n, n_used), (n_experts, m, k) = ids.shape, weight.shape
    out, share = tape.new(n, n_used, m), n_used if len(x.shape) == 2 else 1
    address, bias, kind = weight.data.ctypes.data, 0 if bias is None else bias, weight.type.name
    matrix = m * weight.row_bytes
    if kind in KERNELS:
        units = -(-m // UNIT)
        args = (x, address, bias, out, 1, k, m, ids, matrix, units, share, 4 * m, 4 * k, 4 * m)
        tape.op(float_pair_kernel(kind), ids.size * units, args, [x, ids], [out], 0, OWN_ARGS + 64)
        return out
    units, block = units_of(kind, m), QUANT_TABLE[weight.type].block_size
    if ids.size < 2 * n_experts or (kind in K_FORMATS and m < LANES):
        layout, form = quantised(tape, x, k, block, 1)
        product = _product(weight, address, m, layout, form, 1, out, bias, 0)
        pairs = (ids, matrix, units, share, 4 * m, 4 * m)
        scratch = OWN_ARGS + scratch_bytes(kind, layout, 1)
        tape.op(pair_kernel(kind, block), ids.size * units, product + pairs, [form, ids], [out], 0, scratch)
        return out
    groups = _groups(tape, ids, n_experts)
    layout, form = _ordered(tape, x, k, block, groups, share)
    product = _product(weight, address, m, layout, form, 0, out, bias, groups.order)
    extra = (groups.counts, matrix, units, groups.firsts, 4 * m)
    scratch = OWN_ARGS + scratch_bytes(kind, Layout(block, PANEL, n, k), PANEL)
    reads = [form, groups.counts, groups.firsts, groups.order]
    tape.op(group_kernel(kind, block), n_experts * units, product + extra, reads, [out], max(1, units // 8), scratch)
    return out


def record_head_linear(tape: Tape, x: Buf, weight: QTensor) -> Buf:
    """x (n, heads, k), weight (heads, m, k): (n, heads, m). Heads are experts that every row has chosen, in order."""
    n, heads, _ = x.shape
    key = "own matrices", int(n), heads
    if key not in tape.shared:
        ids = np.tile(np.arange(heads, dtype=np.int32), int(n))
        tape.shared[key] = tape.external(ids, n, heads)
    return record_expert_linear(tape, x, weight, tape.shared[key], None)


def _product(
    weight: QTensor, address: int, m: int, layout: Layout, form: Buf, n: int, out: Buf, bias: Any, order: Any
) -> tuple[Any, ...]:
    """The arguments of matmul_args.py."""
    places = layout.addresses(form.address)
    return (address, weight.row_bytes, m, layout.n_blocks, *places, n, layout.n_panels, out, 4 * m, bias, order)


def _ordered(tape: Tape, x: Buf, k: int, block: int, groups: Groups, share: int) -> tuple[Layout, Buf]:
    """Rows of x quantised in the order of `groups`; made once for a handle and an order."""
    key = ("ordered", k, block, groups.order.address)
    if key not in x.derived:
        layout = Layout(block, PANEL, groups.n_panels * PANEL, k)
        out = tape.new(layout.nbytes, itemsize=1)
        q, sums, d = layout.addresses(out.address)
        args = (x, 4 * k, layout.n_blocks, q, sums, d, layout.n_panels, groups.order, share)
        units = groups.n_panels * PANEL
        tape.op(quantise_ordered_kernel(block, PANEL), units, args, [x, groups.order], [out], step=0, scratch=64)
        x.derived[key] = layout, out
    return x.derived[key]


@kernel
def combine_rows(args: int, begin: int, end: int, scratch: int) -> None:
    """Unit: a row. args: x, weights, out, n_used, m."""
    used, m = arg(args, 3), arg(args, 4)
    for row in range(begin, end):
        x, weights, out = arg(args, 0) + 4 * used * m * row, arg(args, 1) + 4 * used * row, arg(args, 2) + 4 * m * row
        for i in range(0, m - 7, 8):
            y = mul(load_f32x8(x + 4 * i), splat_f32x8(load_f32(weights)))
            for j in range(1, used):
                y = fma(load_f32x8(x + 4 * (j * m + i)), splat_f32x8(load_f32(weights + 4 * j)), y)
            store(out + 4 * i, y)
        rest, i = m % 8, m // 8 * 8
        if rest != 0:
            y = mul(load_part(x + 4 * i, rest, scratch), splat_f32x8(load_f32(weights)))
            for j in range(1, used):
                part = load_part(x + 4 * (j * m + i), rest, scratch)
                y = fma(part, splat_f32x8(load_f32(weights + 4 * j)), y)
            store_part(out + 4 * i, y, rest, scratch)


def record_combine(tape: Tape, x: Buf, weights: Buf) -> Buf:
    """sum over j of weights[i, j] * x[i, j]: (n, n_used, m) -> (n, m), rising j."""
    n, n_used, m = x.shape
    out = tape.new(n, m)
    tape.op(combine_rows, n, (x, weights, out, n_used, m), reads=[x, weights], writes=[out], scratch=64)
    return out


def all_expert_kernels() -> Iterator[Kernel]:
    """Every kernel of this file."""
    for scoring in SCORINGS:
        yield from (route_kernel(scoring, normalise) for normalise in (False, True))
    yield from (group_by_expert, combine_rows)
    yield from (float_pair_kernel(kind) for kind in KERNELS)
    for block in (32, 256):
        yield quantise_ordered_kernel(block, PANEL)
    for kind in sorted(QUANTISED):
        block = QUANT_TABLE[GGMLType[kind]].block_size
        yield from (pair_kernel(kind, block), group_kernel(kind, block))
