"""Paged attention in plain MLX ops: the twin of the attention kernels. Scores, softmax and sums in float32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from edgellm.backends.base import AttentionSpec, Batch
from edgellm.backends.metal.kv import MetalKV

__all__ = ["attention_ops", "slots_of"]


def slots_of(kv: MetalKV, batch: Batch, seq: int, start: int, stop: int) -> mx.array:
    """Slot of positions start..stop of one sequence, int32."""
    size = kv.spec.block_size
    positions = np.arange(start, stop)
    table = batch.block_tables[kv.spec.group][seq]
    return mx.array((table[positions // size] * size + positions % size).astype(np.int32))


def _softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Over the last axis of (heads, rows, positions); a sink adds its logit to the denominator only."""
    top = mx.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        top = mx.maximum(top, sinks[:, None, None])
    e = mx.exp(scores - top)
    total = mx.sum(e, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sinks[:, None, None] - top)
    return e / total


def _one_sequence(q: mx.array, kv: MetalKV, batch: Batch, spec: AttentionSpec, seq: int) -> mx.array:
    """q (rows, n_heads, k_dim) of one sequence -> (rows, n_heads, v_dim)."""
    rows = slice(int(batch.seq_starts[seq]), int(batch.seq_starts[seq + 1]))
    positions = batch.positions[rows]
    stop = int(batch.context_lens[seq])
    start = max(0, int(positions[0]) - spec.window + 1) if spec.window and spec.causal else 0
    slots = slots_of(kv, batch, seq, start, stop)
    group = q.shape[1] // kv.spec.n_kv_heads
    k = mx.repeat(kv.k.read(slots), group, axis=1)
    v = mx.repeat(kv.v.read(slots), group, axis=1)
    scores = (q.transpose(1, 0, 2) @ k.transpose(1, 2, 0)) * spec.scale
    if spec.softcap:
        scores = spec.softcap * mx.tanh(scores / spec.softcap)
    if spec.causal:
        seen = np.arange(start, stop)[None, :] <= positions[:, None]
        if spec.window:
            seen &= np.arange(start, stop)[None, :] > positions[:, None] - spec.window
        scores = mx.where(mx.array(seen)[None], scores, -mx.inf)
    sinks = None if spec.sinks is None else spec.sinks.dense
    return (_softmax(scores, sinks) @ v.transpose(1, 0, 2)).transpose(1, 0, 2)


def attention_ops(q: mx.array, kv: MetalKV, batch: Batch, spec: AttentionSpec) -> mx.array:
    """q (n_tokens, n_heads, k_dim) -> (n_tokens, n_heads, v_dim), one sequence at a time."""
    parts = [
        _one_sequence(q[int(batch.seq_starts[s]) : int(batch.seq_starts[s + 1])], kv, batch, spec, s)
        for s in range(batch.n_seqs)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
