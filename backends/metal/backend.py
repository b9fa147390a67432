"""The Metal backend: the op set on MLX. Without a Metal device plain MLX ops run on the CPU, and it says so."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgellm.backends.base import (
    Array,
    AttentionSpec,
    Backend,
    Batch,
    Int32Array,
    KVPages,
    KVSpec,
    QTensor,
    RopeSpec,
    RouteSpec,
    Weight,
)
from edgellm.backends.metal.affine import AFFINE_TYPES, affine_product, to_affine
from edgellm.backends.metal.attention_kernels import AttentionKernels
from edgellm.backends.metal.attention_ops import attention_ops, slots_of
from edgellm.backends.metal.choice import Choices
from edgellm.backends.metal.dequant_ops import dequantize
from edgellm.backends.metal.kernels import MAX_ROWS, MatmulKernels
from edgellm.backends.metal.kv import MetalKV
from edgellm.backends.metal.limits import apply_limits
from edgellm.backends.metal.weights import DenseCache, MetalWeight, load_weight
from edgellm.config import home

__all__ = ["MetalBackend"]

log = logging.getLogger(__name__)

DENSE_LIMIT = 4 << 30
"""Bytes of dequantised weights kept where no kernel reads the blocks as they lie."""


class MetalBackend(Backend):
    """Lazy MLX graphs, evaluated once a step."""

    name = "metal"

    def __init__(self, make_kernel: Callable[..., Any] | None = None) -> None:
        """`make_kernel`: `mx.fast.metal_kernel` where there is a Metal device, else None for plain ops. Tests pass a
        stand-in that runs a kernel's text on a CPU."""
        if make_kernel is None and mx.metal.is_available():
            make_kernel = mx.fast.metal_kernel
        self._kernels = None if make_kernel is None else MatmulKernels(make_kernel)
        self._attention = None if make_kernel is None else AttentionKernels(make_kernel)
        if make_kernel is None:
            log.warning("no Metal device here: the metal backend runs plain MLX ops on the CPU")
        self._choices: Choices | None = None
        if mx.metal.is_available():
            info = mx.device_info()
            apply_limits(info)
            self._choices = Choices(str(info.get("device_name", "")), home() / "metal")
        self._dense = DenseCache(DENSE_LIMIT)
        self._written: list[MetalKV] = []

    def load(self, tensor: QTensor) -> MetalWeight:
        weight = load_weight(tensor)
        # Tables that rows are read from keep their blocks: only products have another format to choose.
        if self._choices and tensor.type in AFFINE_TYPES and len(tensor.shape) == 2 and "embd" not in tensor.name:
            n, k = tensor.shape
            if self._choices.winner(tensor.type.name, n, k, lambda way: self._seconds(weight, way)) == "affine":
                weight.repack()
        return weight

    def _seconds(self, weight: MetalWeight, way: str) -> float:
        """Time of one row through one way to multiply."""
        x = mx.ones((1, weight.shape[-1]), dtype=mx.float32)
        packed = to_affine(weight.data, weight.kind) if way == "affine" else None
        mx.eval(x, *(packed[:3] if packed else ()))
        started = time.perf_counter()
        mx.eval(affine_product(x, packed) if packed else self._product(x, weight))
        return time.perf_counter() - started

    def new_kv(self, spec: KVSpec, n_blocks: int) -> MetalKV:
        return MetalKV(spec, n_blocks)

    def execute(self, forward: Callable[[Batch], Array], batch: Batch) -> npt.NDArray[np.float32]:
        self._written = []
        out = forward(batch)
        mx.eval(out, *[a for kv in self._written for a in kv.arrays()])
        self._written = []
        return np.array(out, dtype=np.float32)

    # Ops: shapes and meaning in backends/base.py.
    def embed(self, table: Weight, ids: Int32Array) -> Array:
        return dequantize(table.data[mx.array(ids)], table.kind)

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        y = self._product(x, weight)
        return y if bias is None else y + bias.dense

    def _product(self, x: mx.array, weight: MetalWeight) -> mx.array:
        if weight.affine is not None:
            return affine_product(x, weight.affine)
        if self._kernels is None or not self._kernels.fits(weight.kind, x.shape[-1]):
            return x @ self._dense.get(weight).T
        if x.shape[0] <= MAX_ROWS:
            return self._kernels.matvec(weight.data, weight.kind, x)
        half = self._kernels.dequantize_half(weight.data, weight.kind, x.shape[-1])
        return (x.astype(mx.float16) @ half.T).astype(mx.float32)

    def rms_norm(self, x: Array, weight: Weight | None, eps: float) -> Array:
        y = mx.fast.rms_norm(x, None, eps)
        return y if weight is None else y * self._norm(weight)

    def layer_norm(self, x: Array, weight: Weight | None, bias: Weight | None, eps: float) -> Array:
        y = mx.fast.layer_norm(x, None, None, eps)
        y = y if weight is None else y * self._norm(weight)
        return y if bias is None else y + self._norm(bias)

    def _norm(self, weight: MetalWeight) -> mx.array:
        return weight.dense if weight.dense is not None else self._dense.get(weight)

    def rope(self, x: Array, batch: Batch, spec: RopeSpec) -> Array:
        angle = mx.array(batch.positions.astype(np.float32))[:, None] * mx.array(spec.inv_freq[batch.rope_variants])
        size = mx.array(spec.magnitude[batch.rope_variants])[:, None]
        cos, sin = (mx.cos(angle) * size)[:, None], (mx.sin(angle) * size)[:, None]
        turned, rest = x[..., : spec.n_dims], x[..., spec.n_dims :]
        half = spec.n_dims // 2
        if spec.adjacent:
            pairs = turned.reshape(*turned.shape[:-1], half, 2)
            a, b = pairs[..., 0], pairs[..., 1]
            out = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(*turned.shape)
        else:
            a, b = turned[..., :half], turned[..., half:]
            out = mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
        return out if rest.shape[-1] == 0 else mx.concatenate([out, rest], axis=-1)

    def store_kv(self, kv: KVPages, k: Array, v: Array, batch: Batch) -> None:
        assert isinstance(kv, MetalKV)
        parts = []
        for s in range(batch.n_seqs):
            rows = batch.positions[batch.seq_starts[s] : batch.seq_starts[s + 1]]
            parts.append(slots_of(kv, batch, s, int(rows[0]), int(rows[-1]) + 1))
        slots = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        kv.k.write(slots, k)
        kv.v.write(slots, v)
        self._written.append(kv)

    def attention(self, q: Array, kv: KVPages, batch: Batch, spec: AttentionSpec) -> Array:
        assert isinstance(kv, MetalKV)
        if self._attention is not None and self._attention.fits(batch, spec):
            return self._attention(q, kv, batch, spec)
        return attention_ops(q, kv, batch, spec)

    def activate(self, kind: str, gate: Array, up: Array | None = None) -> Array:
        if kind == "swiglu_oai":
            assert up is not None
            g = mx.minimum(gate, 7.0)
            return g * mx.sigmoid(1.702 * g) * (mx.clip(up, -7.0, 7.0) + 1.0)
        y = _ACTIVATIONS[kind](gate)
        return y if up is None else y * up

    def add(self, a: Array, b: Array, scale: float = 1.0) -> Array:
        return a + b if scale == 1.0 else a + b * scale

    def scale(self, x: Array, factor: float, softcap: float = 0.0) -> Array:
        y = x if factor == 1.0 else x * factor
        return softcap * mx.tanh(y / softcap) if softcap else y

    def take(self, x: Array, rows: Int32Array) -> Array:
        return x[mx.array(rows)]

    def route(self, scores: Array, spec: RouteSpec, bias: Weight | None = None) -> tuple[Array, Array]:
        if spec.scoring == "softmax_topk":
            probs = scores
        else:
            probs = mx.sigmoid(scores) if spec.scoring == "sigmoid" else mx.softmax(scores, axis=-1, precise=True)
        order = mx.argsort(-(probs if bias is None else probs + bias.dense), axis=-1)
        ids = order[..., : spec.n_used]
        weights = mx.take_along_axis(probs, ids, axis=-1)
        if spec.scoring == "softmax_topk":
            weights = mx.softmax(weights, axis=-1, precise=True)
        elif spec.normalise:
            weights = weights / mx.sum(weights, axis=-1, keepdims=True)
        return ids, weights * spec.scale

    def expert_linear(self, x: Array, weight: Weight, ids: Array, bias: Weight | None = None) -> Array:
        if self._kernels is not None and self._kernels.fits(weight.kind, x.shape[-1]):
            y = self._kernels.expert_matvec(weight.data, weight.kind, x, ids)
            return y if bias is None else y + self._norm(bias)[ids]
        rows = x[:, None, None, :] if x.ndim == 2 else x[:, :, None, :]
        y = mx.gather_mm(rows, self._dense.get(weight).swapaxes(-1, -2), rhs_indices=ids).squeeze(-2)
        return y if bias is None else y + self._norm(bias)[ids]

    def combine(self, x: Array, weights: Array) -> Array:
        return mx.sum(x * weights[..., None], axis=1)


def _gelu(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.erf(x * 0.7071067811865476))


def _gelu_tanh(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": lambda x: x * mx.sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: mx.maximum(x, 0),
    "tanh": mx.tanh,
}
