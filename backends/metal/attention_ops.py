"""Paged attention in plain MLX ops: what prompts run everywhere, and the twin of the attention kernels.

A prompt chunk goes through MLX's own fused attention, which uses the GPU's matrix units; it knows no soft cap, so
models with one (gemma2) compute scores, softmax and sum step by step. All in float32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from edgellm.backends.base import AttentionSpec, Batch
from edgellm.backends.metal.kv import MetalKV

__all__ = ["attention_ops"]

SCORES = 256 << 20
"""Bytes of scores at once, where they are written out: longer chunks are cut by rows."""


def attention_ops(q: mx.array, kv: MetalKV, batch: Batch, spec: AttentionSpec) -> mx.array:
    """q (n_tokens, n_heads, k_dim) -> (n_tokens, n_heads, v_dim), one sequence at a time."""
    parts = []
    for seq in range(batch.n_seqs):
        first, end = int(batch.seq_starts[seq]), int(batch.seq_starts[seq + 1])
        rows = max(1, SCORES // (4 * q.shape[1] * int(batch.context_lens[seq])))
        for at in range(first, end, rows):
            parts.append(_rows(q, slice(at, min(end, at + rows)), kv, batch, spec, seq))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)


def _rows(q: mx.array, rows: slice, kv: MetalKV, batch: Batch, spec: AttentionSpec, seq: int) -> mx.array:
    """Some rows of one sequence."""
    positions = batch.positions[rows]
    start = max(0, int(positions[0]) - spec.window + 1) if spec.window else 0
    stop = int(positions[-1]) + 1 if spec.causal else int(batch.context_lens[seq])
    size, seen = kv.spec.block_size, np.arange(start, stop)
    slots = batch.block_tables[kv.spec.group][seq][seen // size] * size + seen % size
    slots = mx.array(slots.astype(np.int32))
    k, v = kv.k.read(slots).transpose(1, 0, 2), kv.v.read(slots).transpose(1, 0, 2)
    mask = None
    if (spec.causal or spec.window) and len(positions) > 1:
        ahead = seen - positions[:, None]
        visible = ahead <= 0 if spec.causal else ahead < spec.window
        mask = mx.array(visible & (ahead > -spec.window) if spec.window else visible)
    sinks = None if spec.sinks is None else spec.sinks.dense
    queries = q[rows].transpose(1, 0, 2)
    if spec.softcap:
        out = _softcapped(queries, k, v, mask, sinks, spec)
    else:
        out = mx.fast.scaled_dot_product_attention(
            queries[None], k[None], v[None], scale=spec.scale, mask=mask, sinks=sinks
        )[0]
    return out.transpose(1, 0, 2)


def _softcapped(
    q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, sinks: mx.array | None, spec: AttentionSpec
) -> mx.array:
    """q (heads, rows, k_dim), k and v (kv heads, positions, dim) -> (heads, rows, v_dim)."""
    heads, rows, dim = q.shape
    grouped = q.reshape(k.shape[0], -1, rows, dim)
    scores = grouped @ k[:, None].swapaxes(-1, -2) * spec.scale
    scores = spec.softcap * mx.tanh(scores / spec.softcap)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    top = mx.max(scores, axis=-1, keepdims=True)
    extra = None if sinks is None else sinks.reshape(k.shape[0], -1, 1, 1)
    if extra is not None:
        top = mx.maximum(top, extra)
    e = mx.exp(scores - top)
    total = mx.sum(e, axis=-1, keepdims=True)
    if extra is not None:
        total = total + mx.exp(extra - top)  # a sink takes probability and gives no value
    return (e / total @ v[:, None]).reshape(heads, rows, -1)
