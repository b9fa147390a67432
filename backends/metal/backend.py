"""The Metal backend: the op set on MLX. Without a Metal device plain MLX ops run on the CPU, and it says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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
from edgellm.backends.metal.attention_kernels import AttentionKernels
from edgellm.backends.metal.attention_ops import attention_ops
from edgellm.backends.metal.choice import Choices
from edgellm.backends.metal.dequant_ops import dequantize
from edgellm.backends.metal.elementwise import Elementwise
from edgellm.backends.metal.kernels import MAX_ROWS, MatmulKernels
from edgellm.backends.metal.kv import MetalKV
from edgellm.backends.metal.limits import apply_limits, device_info, limits_of
from edgellm.backends.metal.normed import Normed, plain
from edgellm.backends.metal.products import Products
from edgellm.backends.metal.selftest import check_attention
from edgellm.backends.metal.step import Step
from edgellm.backends.metal.weights import MetalWeight, load_weight
from edgellm.config import home
from edgellm.errors import MemoryBudgetError

__all__ = ["MetalBackend"]

log = logging.getLogger(__name__)


class MetalBackend(Backend):
    """Lazy MLX graphs, evaluated once a step."""

    name = "metal"

    def __init__(self, make_kernel: Callable[..., Any] | None = None) -> None:
        """`make_kernel`: `mx.fast.metal_kernel` where there is a Metal device, else None for plain ops. Tests pass a
        stand-in that runs a kernel's text on a CPU."""
        info = device_info()
        limits, choices = limits_of(info), None
        self.memory_limit = limits.wired or None
        self._largest = limits.buffer or None
        if mx.metal.is_available():
            make_kernel = make_kernel or mx.fast.metal_kernel
            apply_limits(limits)
            choices = Choices(str(info.get("device_name", "")), home() / "metal")
        if make_kernel is None:
            log.warning("no Metal device here: the metal backend runs plain MLX ops on the CPU")
        self._attention = None if make_kernel is None else _attention_kernels(make_kernel, choices)
        kernels = None if make_kernel is None else MatmulKernels(make_kernel)
        self._products = Products(kernels, choices, limits.wired // 16)
        self._elementwise = Elementwise(compiled=make_kernel is not None)
        self._norms_wait = make_kernel is not None
        self._room: int | None = None
        self._written: list[MetalKV] = []
        self._step: Step | None = None

    def keep_weights(self, n_bytes: int | None) -> None:
        self._room = n_bytes

    def load(self, tensor: QTensor) -> MetalWeight:
        if self._largest and tensor.nbytes > self._largest:
            raise MemoryBudgetError(
                f"{tensor.name} is {tensor.nbytes} bytes, but this GPU takes at most {self._largest} in one piece; "
                "use --backend cpu, or a smaller quantisation"
            )
        mapped = self._room is not None and tensor.nbytes > self._room and len(tensor.shape) > 1
        if self._room is not None and not mapped:
            self._room -= tensor.nbytes
        weight = load_weight(tensor, mapped)
        self._products.choose_format(weight)
        return weight

    def new_kv(self, spec: KVSpec, n_blocks: int) -> MetalKV:
        return MetalKV(spec, n_blocks)

    def execute(self, forward: Callable[[Batch], Array], batch: Batch) -> npt.NDArray[np.float32]:
        self._written, self._step = [], Step(batch)
        try:
            out = plain(forward(batch))
            mx.eval(out, *[a for kv in self._written for a in kv.arrays()])
            return np.array(out, dtype=np.float32)
        finally:
            self._written, self._step = [], None

    def _at(self, batch: Batch) -> Step:
        if self._step is None or self._step.batch is not batch:
            self._step = Step(batch)
        return self._step

    def _field(self, values: Int32Array) -> mx.array:
        return mx.array(values) if self._step is None else self._step.field(values)

    # Ops: shapes and meaning in backends/base.py.
    def embed(self, table: Weight, ids: Int32Array) -> Array:
        return dequantize(table.rows(ids, self._field(ids)), table.kind)

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        return self.linears(x, (weight,), (bias,))[0]

    def linears(self, x: Array, weights: Sequence[Weight], biases: Sequence[Weight | None]) -> tuple[Array, ...]:
        products = zip(self._products.linears(x, weights), biases, strict=True)
        return tuple(y if bias is None else y + bias.dense for y, bias in products)

    def rms_norm(self, x: Array, weight: Weight | None, eps: float) -> Array:
        x = plain(x)
        if weight is None or len(weight.shape) > 1:
            y = mx.fast.rms_norm(x, None, eps)
            return y if weight is None else y * self._norm(weight)
        if self._norms_wait and x.ndim == 2 and x.shape[0] <= MAX_ROWS:
            return Normed(x, weight.dense, eps)
        return mx.fast.rms_norm(x, weight.dense, eps)

    def layer_norm(self, x: Array, weight: Weight | None, bias: Weight | None, eps: float) -> Array:
        y = mx.fast.layer_norm(plain(x), None, None, eps)
        y = y if weight is None else y * self._norm(weight)
        return y if bias is None else y + self._norm(bias)

    def _norm(self, weight: MetalWeight) -> mx.array:
        return weight.dense if weight.dense is not None else self._products.dense.get(weight)

    def rope(self, x: Array, batch: Batch, spec: RopeSpec) -> Array:
        """MLX's own `rope` takes one table for all rows and one position per sequence; here each row may have its own
        table and position, and the angles are shared by all layers of a step."""
        cos, sin = self._at(batch).angles(spec)
        turned, rest = x[..., : spec.n_dims], x[..., spec.n_dims :]
        half = spec.n_dims // 2
        if spec.adjacent:
            pairs = turned.reshape(*turned.shape[:-1], half, 2)
            rotated = self._elementwise.rotated(pairs[..., 0], pairs[..., 1], cos, sin)
            out = mx.stack(list(rotated), axis=-1).reshape(*turned.shape)
        else:
            rotated = self._elementwise.rotated(turned[..., :half], turned[..., half:], cos, sin)
            out = mx.concatenate(list(rotated), axis=-1)
        return out if rest.shape[-1] == 0 else mx.concatenate([out, rest], axis=-1)

    def store_kv(self, kv: KVPages, k: Array, v: Array, batch: Batch) -> None:
        assert isinstance(kv, MetalKV)
        step = self._at(batch)
        kv.reserve(step.n_blocks(kv.spec.group, kv.spec.block_size))
        slots = step.slots(kv.spec.group, kv.spec.block_size)
        kv.k.write(slots, k)
        kv.v.write(slots, v)
        self._written.append(kv)

    def attention(self, q: Array, kv: KVPages, batch: Batch, spec: AttentionSpec) -> Array:
        assert isinstance(kv, MetalKV)
        if self._attention is not None and self._attention.fits(batch, spec):
            return self._attention(q, kv, self._at(batch), spec)
        return attention_ops(q, kv, batch, spec)

    def activate(self, kind: str, gate: Array, up: Array | None = None) -> Array:
        if up is None:
            return self._elementwise.activate[kind](plain(gate))
        return self._elementwise.gated[kind](plain(gate), plain(up))

    def gated_mlp(self, x: Array, gate: Weight, up: Weight, down: Weight, kind: str) -> Array:
        return self.linear(self.activate(kind, *self.linears(x, (gate, up), (None, None))), down)

    def add(self, a: Array, b: Array, scale: float = 1.0) -> Array:
        return plain(a) + plain(b) if scale == 1.0 else plain(a) + plain(b) * scale

    def scale(self, x: Array, factor: float, softcap: float = 0.0) -> Array:
        x = plain(x)
        if softcap:
            return self._elementwise.softcapped(x, mx.array(factor), mx.array(softcap))
        return x if factor == 1.0 else x * factor

    def take(self, x: Array, rows: Int32Array) -> Array:
        return plain(x)[self._field(rows)]

    def route(self, scores: Array, spec: RouteSpec, bias: Weight | None = None) -> tuple[Array, Array]:
        if spec.scoring == "softmax_topk":
            probs = scores
        else:
            probs = mx.sigmoid(scores) if spec.scoring == "sigmoid" else mx.softmax(scores, axis=-1, precise=True)
        ranked = probs if bias is None else probs + bias.dense
        if spec.n_groups > 1:
            grouped = ranked.reshape(len(ranked), spec.n_groups, -1)
            counted = 1 if spec.scoring == "softmax" else 2
            worth = mx.sum(mx.sort(grouped, axis=-1)[..., -counted:], axis=-1)
            kept = mx.argsort(mx.argsort(-worth, axis=-1), axis=-1) < spec.n_groups_used
            ranked = mx.where(kept[..., None], grouped, -mx.inf).reshape(ranked.shape)
        order = mx.argsort(-ranked, axis=-1)
        ids = order[..., : spec.n_used]
        weights = mx.take_along_axis(probs, ids, axis=-1)
        if spec.scoring == "softmax_topk":
            weights = mx.softmax(weights, axis=-1, precise=True)
        elif spec.normalise:
            weights = weights / mx.sum(weights, axis=-1, keepdims=True)
        return ids, weights * spec.scale

    def expert_linear(self, x: Array, weight: Weight, ids: Array, bias: Weight | None = None) -> Array:
        y = self._products.experts(plain(x), weight, ids)
        return y if bias is None else y + self._norm(bias)[ids]

    def head_linear(self, x: Array, weight: Weight) -> Array:
        n, heads, _ = x.shape
        own = mx.broadcast_to(mx.arange(heads, dtype=mx.uint32), (n, heads))
        return self._products.experts(plain(x), weight, own)

    def columns(self, x: Array, start: int, stop: int) -> Array:
        return plain(x)[..., start:stop]

    def concat(self, a: Array, b: Array) -> Array:
        return mx.concatenate([plain(a), plain(b)], axis=-1)

    def combine(self, x: Array, weights: Array) -> Array:
        return mx.sum(x * weights[..., None], axis=1)


def _attention_kernels(make_kernel: Callable[..., Any], choices: Choices | None) -> AttentionKernels | None:
    """The attention kernels where they are right on this device."""
    kernels = AttentionKernels(make_kernel)
    if choices is None or choices.passed("attention", lambda: all(c.passed for c in check_attention(kernels))):
        return kernels
    log.warning("the attention kernels are wrong on this device: plain MLX ops take their place (edgellm doctor)")
    return None
