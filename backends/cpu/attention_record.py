"""Attention on the tape: which kernels a step needs, with which tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.backends.base import AttentionSpec
from edgellm.backends.cpu.arena import Buf
from edgellm.backends.cpu.attention import attention_combine, scratch_bytes, tile_kernel
from edgellm.backends.cpu.attention_inner import HALVES, REGISTERS, ROWS_AT_ONCE
from edgellm.backends.cpu.attention_plan import Plan, plan_of
from edgellm.backends.cpu.jit import Kernel
from edgellm.backends.cpu.kv import CPUPages
from edgellm.backends.cpu.tape import Tape

__all__ = ["attention_kernels", "record_attention"]


def _few_rows(group: int) -> int:
    """Pairs at once for decode: the group, or a part of it that registers can hold."""
    limit = REGISTERS // (2 * HALVES)
    return next(r for r in range(min(limit, group), 0, -1) if group % r == 0)


def attention_kernels(kv_type: str, k_dim: int, v_dim: int, group: int) -> tuple[Kernel, Kernel]:
    """The kernels of one shape: for few rows of a sequence, and for many."""
    few, many = (tile_kernel(kv_type, k_dim, v_dim, group, rows) for rows in (_few_rows(group), ROWS_AT_ONCE))
    return few, many


def record_attention(tape: Tape, q: Buf, pages: CPUPages, spec: AttentionSpec, sinks: Any, n_threads: int) -> Buf:
    """q (n_tokens, n_heads, k_dim) against the cache: (n_tokens, n_heads, v_dim)."""
    kv, layout = pages.spec, pages.layout
    n_tokens, n_heads, _ = q.shape
    group = n_heads // kv.n_kv_heads
    out = tape.new(n_tokens, n_heads, kv.v_dim)
    plan: Plan = plan_of(tape, kv, spec, group, n_threads)
    batch = tape.batch
    table = batch.block_tables[kv.group]
    place = (pages.address, pages.stride, layout.head, layout.v, layout.k_scales, layout.v_scales - layout.v)
    mask = (np.float32(spec.scale), np.float32(spec.softcap), spec.window, 0 if sinks is None else sinks)
    rest = (table, table.shape[1], *place, n_heads, *mask, int(spec.causal), batch.context_lens)
    # Both kernels write other parts of the same memory: named once, so that no barrier comes between them.
    writes: list[Any] = [out, plan.span]
    for tiles, rows in ((plan.few, _few_rows(group)), (plan.many, ROWS_AT_ONCE)):
        if tiles is not None:
            item = tile_kernel(kv.kv_type, kv.k_dim, kv.v_dim, group, rows)
            size = scratch_bytes(kv.k_dim, kv.v_dim, tiles.rows * group + rows)
            args = (q, out, tiles.units, plan.cell, batch.positions, *rest)
            op = tape.op(item, 0, args, reads=[q, pages.span], writes=writes, scratch=size)
            writes = []
            tiles.ops.append(op)
    combine = (out, plan.combine, plan.cell, n_heads, kv.v_dim, group, 0 if sinks is None else sinks)
    op = tape.op(attention_combine, 0, combine, reads=[plan.span], writes=[out], scratch=8 * kv.v_dim + 256)
    plan.combine_ops.append(op)
    return out
