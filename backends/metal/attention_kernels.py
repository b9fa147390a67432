"""Launch of the paged attention kernels (twin: `attention_ops`): partitions of fixed length counted from position 0,
then joined in order, so that a row's result does not depend on what else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from edgellm.backends.base import AttentionSpec, Batch
from edgellm.backends.metal.kernels import kernel_text
from edgellm.backends.metal.kv import MetalKV
from edgellm.backends.metal.step import Step

__all__ = ["MAX_QUERY_ROWS", "AttentionKernels"]

PARTITION = 256
"""Positions per partition: enough simdgroups at 8k tokens to fill a large GPU, few partial sums to join."""
MAX_QUERY_ROWS = 8
"""Rows of one sequence the kernels take; longer chunks go through matrix products (`attention_ops`)."""
REGISTERS = 100
"""Floats per thread that one simdgroup's heads may take, of the 128 an M1 has."""


def _split(group: int, dim: int) -> int:
    """Into how many parts to cut the query heads of one kv head; a divisor of `group`."""
    per_lane = -(-dim // 32)
    fitting = (
        n for n in range(1, group) if group % n == 0 and (2 * group // n + 2) * per_lane + 2 * group // n <= REGISTERS
    )
    return next(fitting, group)


class AttentionKernels:
    """The two kernels of one device."""

    def __init__(self, make: Callable[..., Any] | None = None):
        make_kernel: Callable[..., Any] = make or mx.fast.metal_kernel
        inputs = ["q", "k", "v", "k_scales", "v_scales", "table", "positions", "seqs", "params"]
        self._partial: Callable[..., Any] = make_kernel(
            name="attention_partial",
            input_names=inputs,
            output_names=["sums", "stats"],
            source=kernel_text("attention_partial"),
        )
        self._combine: Callable[..., Any] = make_kernel(
            name="attention_combine",
            input_names=["sums", "stats", "sinks"],
            output_names=["out"],
            source=kernel_text("attention_combine"),
        )

    @staticmethod
    def fits(batch: Batch, spec: AttentionSpec) -> bool:
        """Whether this step's rows are few enough, and causal."""
        return spec.causal and int(np.diff(batch.seq_starts).max()) <= MAX_QUERY_ROWS

    def __call__(self, q: mx.array, kv: MetalKV, step: Step, spec: AttentionSpec) -> mx.array:
        """q (rows, n_heads, k_dim) -> (rows, n_heads, v_dim)."""
        rows, heads, _ = q.shape
        shape, batch = kv.spec, step.batch
        split = _split(heads // shape.n_kv_heads, max(shape.k_dim, shape.v_dim))
        parts = -(-int(batch.context_lens.max()) // PARTITION)
        none = mx.zeros((1,), dtype=mx.float16)
        sums, stats = self._partial(
            inputs=[
                q,
                kv.k.values,
                kv.v.values,
                none if kv.k.scales is None else kv.k.scales,
                none if kv.v.scales is None else kv.v.scales,
                step.field(batch.block_tables[shape.group]),
                step.field(batch.positions),
                step.seqs,
                mx.array([spec.scale, spec.softcap], dtype=mx.float32),
            ],
            template=[
                *[("D", shape.k_dim), ("DV", shape.v_dim), ("HKV", shape.n_kv_heads)],
                *[("GROUP", heads // shape.n_kv_heads // split), ("SPLIT", split)],
                *[("BS", shape.block_size), ("PART", PARTITION)],
                *[("WINDOW", spec.window), ("QUANT", kv.k.scales is not None)],
            ],
            grid=(32 * parts, shape.n_kv_heads * split, rows),
            threadgroup=(32, 1, 1),
            output_shapes=[(rows, heads, parts, shape.v_dim), (rows, heads, parts, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        return self._combine(
            inputs=[sums, stats, none if spec.sinks is None else spec.sinks.dense],
            template=[("DV", shape.v_dim), ("SINKS", spec.sinks is not None)],
            grid=(shape.v_dim, heads, rows),
            threadgroup=(min(shape.v_dim, 64), 1, 1),
            output_shapes=[(rows, heads, shape.v_dim)],
            output_dtypes=[mx.float32],
        )[0]
