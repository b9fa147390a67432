"""A model whose layers do not all fit one device: the embedding and the first layers run on one backend, the other
layers and the output head on a second one.

Models know nothing of it: they call ops, and an op on a weight of the second part is where the hidden states cross. A
step runs the forward pass on the first backend up to that op, then once more for the second, this time with shapes in
place of the first part's results and the hidden states at the crossing. The first backend may record and replay; the
second must compute as it is called, and needs `array(values)` to take the hidden states."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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

__all__ = ["ModelBytes", "SplitBackend", "layers_outside"]

BEFORE, AFTER = -1, 1 << 30
"""Layer numbers of what comes before the first and after the last layer."""


@dataclass(frozen=True)
class ModelBytes:
    """What a model takes on a device: each layer's weights and cache; the embedding; the output head (the embedding's
    table once more where they are tied); a step's scratch."""

    layers: tuple[int, ...]
    embedding: int
    head: int
    scratch: int
    tied: bool


def layers_outside(need: ModelBytes, free: int) -> int:
    """How many of the first layers must stay outside a device with `free` bytes: 0 when the whole model fits."""
    whole = sum(need.layers) + need.embedding + need.scratch + (0 if need.tied else need.head)
    if whole <= free:
        return 0
    left = free - need.head - need.scratch
    inside = 0
    for size in reversed(need.layers):
        left -= size
        if left < 0:
            break
        inside += 1
    return len(need.layers) - inside


class _Crossed(Exception):
    """The forward pass has come to the second part; `x` are the hidden states it wants to take there."""

    def __init__(self, x: Array):
        self.x = x


class _Skipped:
    """Stands for a result of the first part while the second runs: a shape, and at the crossing a value."""

    def __init__(self, *shape: int):
        self.shape = shape
        self.value: Array | None = None

    def reshape(self, *shape: int) -> Any:
        """As an Array does."""
        if self.value is not None:
            return self.value.reshape(*shape)
        known = -int(np.prod(shape))
        return _Skipped(*(int(np.prod(self.shape)) // known if n == -1 else n for n in shape))


class _Weight:
    """A weight on the backend of its layer; on the other one, too, once an op there asks for it (a tied head)."""

    def __init__(self, tensor: QTensor, layer: int):
        self.tensor, self.shape, self.layer = tensor, tensor.shape, layer
        self._on: dict[int, Weight] = {}

    def on(self, backend: Backend) -> Weight:
        if id(backend) not in self._on:
            self._on[id(backend)] = backend.load(self.tensor)
        return self._on[id(backend)]


class SplitBackend(Backend):
    """`outside` layers of `total` on `first`, the rest on `second`."""

    def __init__(self, first: Backend, second: Any, outside: int, total: int):
        self.first, self.second, self.outside, self.total = first, second, outside, total
        self.name = f"{second.name}+{first.name}:{outside}"
        self._backend: Backend | None = first
        self._hidden: npt.NDArray[np.float32] | None = None

    @property
    def words(self) -> str:
        """The split for people."""
        there = self.second.describe().get("device", self.second.name)
        return (
            f"{self.total - self.outside} of {self.total} layers and the output head on {there}; the first "
            f"{self.outside} layers do not fit there and run on the {self.first.name} backend"
        )

    def describe(self) -> dict[str, Any]:
        numbers = {"layers": self.total, "layers_outside": self.outside, "split": self.words}
        return {**self.second.describe(), "name": self.name, **numbers}

    def load(self, tensor: QTensor) -> _Weight:
        found = re.match(r"blk\.(\d+)\.", tensor.name)
        layer = int(found[1]) if found else AFTER if tensor.name.startswith("output") else BEFORE
        weight = _Weight(tensor, layer)
        weight.on(self.first if layer < self.outside else self.second)
        return weight

    def new_kv(self, spec: KVSpec, n_blocks: int) -> KVPages:
        backend: Backend = self.first if spec.layer < self.outside else self.second
        return backend.new_kv(spec, n_blocks)

    def execute(self, forward: Callable[[Batch], Array], batch: Batch) -> npt.NDArray[np.float32]:
        self._hidden = self.first.execute(partial(self._until_crossing, forward), batch)
        out: npt.NDArray[np.float32] = self.second.execute(partial(self._from_crossing, forward), batch)
        return out

    def close(self) -> None:
        self.first.close()
        self.second.close()

    def _until_crossing(self, forward: Callable[[Batch], Array], batch: Batch) -> Array:
        self._backend = self.first
        try:
            forward(batch)
        except _Crossed as crossed:
            return crossed.x
        raise RuntimeError("the forward pass took no weight of the second part")

    def _from_crossing(self, forward: Callable[[Batch], Array], batch: Batch) -> Array:
        self._backend = None  # neither: until the crossing there is nothing to compute
        return forward(batch)

    def _op(self, name: str, x: Array, args: Sequence[Any], *shape: int) -> Any:
        """Op `name` of x and `args` where it belongs; `shape`: of its result."""
        crosses = any(isinstance(a, _Weight) and a.layer >= self.outside for a in args)
        if self._backend is self.first and crosses:
            raise _Crossed(x)
        if self._backend is None:
            if not crosses:
                return _Skipped(*shape)
            self._backend = self.second
            x.value = self.second.array(self._hidden)
        backend = self._backend
        return getattr(backend, name)(_there(x, backend), *(_there(a, backend) for a in args))

    # Ops: shapes and meaning in base.py.
    def embed(self, table: Weight, ids: Int32Array) -> Array:
        return self._op("embed", table, (ids,), len(ids), table.shape[1])

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        return self._op("linear", x, (weight, bias), x.shape[0], weight.shape[0])

    def rms_norm(self, x: Array, weight: Weight | None, eps: float) -> Array:
        return self._op("rms_norm", x, (weight, eps), *x.shape)

    def layer_norm(self, x: Array, weight: Weight | None, bias: Weight | None, eps: float) -> Array:
        return self._op("layer_norm", x, (weight, bias, eps), *x.shape)

    def rope(self, x: Array, batch: Batch, spec: RopeSpec) -> Array:
        return self._op("rope", x, (batch, spec), *x.shape)

    def store_kv(self, kv: KVPages, k: Array, v: Array, batch: Batch) -> None:
        self._op("store_kv", kv, (k, v, batch))

    def attention(self, q: Array, kv: KVPages, batch: Batch, spec: AttentionSpec) -> Array:
        return self._op("attention", q, (kv, batch, spec), q.shape[0], q.shape[1], kv.spec.v_dim)

    def activate(self, kind: str, gate: Array, up: Array | None = None) -> Array:
        return self._op("activate", kind, (gate, up), *gate.shape)

    def add(self, a: Array, b: Array, scale: float = 1.0) -> Array:
        return self._op("add", a, (b, scale), *a.shape)

    def scale(self, x: Array, factor: float, softcap: float = 0.0) -> Array:
        return self._op("scale", x, (factor, softcap), *x.shape)

    def take(self, x: Array, rows: Int32Array) -> Array:
        return self._op("take", x, (rows,), len(rows), x.shape[1])

    def route(self, scores: Array, spec: RouteSpec, bias: Weight | None = None) -> tuple[Array, Array]:
        if self._backend is None:
            return _Skipped(scores.shape[0], spec.n_used), _Skipped(scores.shape[0], spec.n_used)
        ids, weights = self._op("route", scores, (spec, bias))
        return ids, weights

    def expert_linear(self, x: Array, weight: Weight, ids: Array, bias: Weight | None = None) -> Array:
        return self._op("expert_linear", x, (weight, ids, bias), *ids.shape, weight.shape[1])

    def head_linear(self, x: Array, weight: Weight) -> Array:
        return self._op("head_linear", x, (weight,), x.shape[0], x.shape[1], weight.shape[1])

    def columns(self, x: Array, start: int, stop: int) -> Array:
        return self._op("columns", x, (start, stop), *x.shape[:-1], stop - start)

    def concat(self, a: Array, b: Array) -> Array:
        return self._op("concat", a, (b,), *a.shape[:-1], a.shape[-1] + b.shape[-1])

    def combine(self, x: Array, weights: Array) -> Array:
        return self._op("combine", x, (weights,), x.shape[0], x.shape[2])

    def gated_mlp(self, x: Array, gate: Weight, up: Weight, down: Weight, kind: str) -> Array:
        return self._op("gated_mlp", x, (gate, up, down, kind), x.shape[0], down.shape[0])


def _there(value: Any, backend: Backend) -> Any:
    """An op's argument as `backend` knows it."""
    if isinstance(value, _Weight):
        return value.on(backend)
    if isinstance(value, AttentionSpec) and value.sinks is not None:
        return replace(value, sinks=value.sinks.on(backend))
    if isinstance(value, _Skipped):
        if value.value is None:
            raise RuntimeError("more than the hidden states would have to cross between the two parts")
        return value.value
    return value
