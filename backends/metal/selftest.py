"""Every kernel of this very device against its plain-ops twin, which runs on the CPU because a GPU's matmul may round
to fewer bits: before a kernel is first trusted, and with speeds in `edgellm doctor --backend metal`.

The report is meant to be pasted into an issue: these kernels were written and tested without Apple hardware."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from edgellm.backends.base import AttentionSpec, Batch, KVSpec
from edgellm.backends.metal.attention_kernels import AttentionKernels
from edgellm.backends.metal.attention_ops import attention_ops
from edgellm.backends.metal.dequant_ops import dequantize
from edgellm.backends.metal.kernels import KERNEL_TYPES, MatmulKernels
from edgellm.backends.metal.kv import MetalKV
from edgellm.backends.metal.step import Step
from edgellm.quants import QUANT_TABLE, GGMLType

__all__ = [
    "Check",
    "attention_case",
    "check_attention",
    "check_kernels",
    "check_type",
    "copy_bandwidth",
    "kernel_speeds",
]

LIMIT = 1e-10
"""Normalised mean squared error allowed between a float32 kernel and its twin."""
HALF_LIMIT = 1e-6
SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "MXFP4": ()}
"""Byte offsets of float16 scales where they are not (0, 2) for K-quants or (0,)."""


@dataclass(frozen=True)
class Check:
    """One comparison: `error` is normalised mean squared, or the reason why the kernel did not run."""

    name: str
    error: float | str
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the kernel ran and agreed."""
        return not isinstance(self.error, str) and self.error <= self.limit


def random_blocks(kind: GGMLType, n: int, k: int, rng: np.random.Generator) -> mx.array:
    """uint8 (n, row_bytes): random quants, small finite scales."""
    info = QUANT_TABLE[kind]
    if kind in (GGMLType.F16, GGMLType.BF16):
        dtype = mx.float16 if kind is GGMLType.F16 else mx.bfloat16
        return mx.array(rng.standard_normal((n, k)).astype(np.float32)).astype(dtype).view(mx.uint8)
    raw = rng.integers(0, 256, (n, k // info.block_size, info.type_size), dtype=np.uint8)
    default = (0, 2) if kind.name in ("Q4_K", "Q5_K") else (0,)
    for at in SCALES_AT.get(kind.name, default):
        scale = (rng.standard_normal((n, raw.shape[1], 1)) * 0.05).astype(np.float16)
        raw[:, :, at : at + 2] = scale.view(np.uint8).reshape(n, -1, 2)
    if kind is GGMLType.MXFP4:
        raw[:, :, 0] = 120
    return mx.array(raw.reshape(n, -1))


def check_kernels(make: Callable[..., Any] | None = None) -> Iterator[Check]:
    """Every kernel at awkward sizes. `make` as in `MatmulKernels`."""
    kernels = MatmulKernels(make)
    for kind in sorted(KERNEL_TYPES):
        yield from check_type(kernels, kind)
    yield from check_attention(AttentionKernels(make))


def check_type(kernels: MatmulKernels, kind: GGMLType) -> Iterator[Check]:
    """The kernels of one block type."""
    rng = np.random.default_rng(int(kind))
    data = mx.stack([random_blocks(kind, 7, 512, rng) for _ in range(3)])
    ids = mx.array([[2, 0], [1, 1]])
    x, gain = (mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in ((5, 512), (512,)))
    with mx.stream(mx.cpu):
        weights = dequantize(data, kind)
        product = x @ weights[0].T
        normed = mx.fast.rms_norm(x, gain, 1e-5) @ mx.concatenate([weights[0], weights[1]]).T
        expected = mx.einsum("tk,tjnk->tjn", x[:2], weights[ids])
        mx.eval(weights, product, normed, expected)
    for rows in (1, 5):
        yield _check(f"matvec {kind.name} {rows} rows", product[:rows], kernels.matvec, data[0], kind, x[:rows])
    yield _check(f"norm and two of {kind.name}", normed, _normed, kernels, data, kind, x, gain)
    x = x[:2]
    yield _check(f"experts {kind.name}", expected, kernels.expert_matvec, data, kind, x, ids)
    name = f"dequantise {kind.name}"
    yield _check(name, weights[0], kernels.dequantize_half, data[0], kind, 512, limit=HALF_LIMIT)


def check_attention(attention: AttentionKernels) -> Iterator[Check]:
    """The attention kernels with each type of cache."""
    for kv_type in ("f32", "f16", "q8_0"):
        q, kv, batch, spec = attention_case(kv_type, np.random.default_rng(0))
        with mx.stream(mx.cpu):
            expected = attention_ops(q, kv, batch, spec)
            mx.eval(expected)
        yield _check(f"attention {kv_type}", expected, attention, q, kv, Step(batch), spec)


def _normed(kernels: MatmulKernels, data: mx.array, kind: GGMLType, x: mx.array, gain: mx.array) -> mx.array:
    return mx.concatenate(kernels.matvecs([data[0], data[1]], kind, x, gain, 1e-5), axis=-1)


def _check(
    name: str, expected: mx.array, kernel: Callable[..., mx.array], *arguments: Any, limit: float = LIMIT
) -> Check:
    try:
        got = np.array(kernel(*arguments)).astype(np.float64)
    except Exception as error:  # the Metal compiler's text is what a report needs
        return Check(name, f"{type(error).__name__}: {error}".splitlines()[0], limit)
    right = np.array(expected).astype(np.float64)
    return Check(name, float(((got - right) ** 2).mean() / (right**2).mean()), limit)


def attention_case(kv_type: str, rng: np.random.Generator) -> tuple[mx.array, MetalKV, Batch, AttentionSpec]:
    """Two sequences, one behind a partition border, windowed and soft-capped."""
    kv = MetalKV(KVSpec(2, 64, 64, kv_type, 32, 0), 24)
    for rows in (kv.k, kv.v):
        rows.write(mx.arange(24 * 32), mx.array(rng.standard_normal((24 * 32, 2, 64)).astype(np.float32)))
    table = np.stack([rng.permutation(23), rng.permutation(23)]).astype(np.int32) + 1
    batch = Batch(
        ids=np.zeros(3, np.int32),
        positions=np.array([600, 4, 5], np.int32),
        seq_starts=np.array([0, 1, 3], np.int32),
        context_lens=np.array([601, 6], np.int32),
        block_tables=(table,),
        output_rows=np.arange(3, dtype=np.int32),
        rope_variants=np.zeros(3, np.int32),
    )
    q = mx.array(rng.standard_normal((3, 6, 64)).astype(np.float32))
    return q, kv, batch, AttentionSpec(scale=0.125, window=400, softcap=20.0)


def _seconds(run: Callable[[], Any], repeats: int = 10) -> float:
    mx.eval(run())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        mx.eval(run())
        times.append(time.perf_counter() - started)
    return min(times)


def copy_bandwidth(n_bytes: int = 1 << 29) -> float:
    """GB/s read and written by adding 1 to a large array."""
    x = mx.zeros((n_bytes // 4,), dtype=mx.float32)
    mx.eval(x)
    return 2 * n_bytes / _seconds(lambda: x + 1) / 1e9


def kernel_speeds(n: int = 8192, k: int = 8192) -> Iterator[tuple[str, float]]:
    """(type, GB/s of weights) of one row times an n x k matrix, per type."""
    rng = np.random.default_rng(0)
    kernels, x = MatmulKernels(), mx.ones((1, k), dtype=mx.float32)
    for kind in sorted(KERNEL_TYPES):
        rows = random_blocks(kind, 64, k, rng)
        data = mx.contiguous(mx.tile(rows, (n // 64, 1)))
        mx.eval(data)
        yield kind.name, data.nbytes / _seconds(partial(kernels.matvec, data, kind, x)) / 1e9
