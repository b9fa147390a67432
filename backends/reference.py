"""The op set in numpy: obvious, slow, and the definition of what every other backend must compute.

Weights are dequantised to float32 when they are first used and kept while `cache_bytes` lasts; past it they are
dequantised again at each use, some rows at a time. Everything is float32; nothing here rounds activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import (
    AttentionSpec,
    Backend,
    Batch,
    KVPages,
    KVSpec,
    QTensor,
    RopeSpec,
    RouteSpec,
)
from edgellm.backends.dequant import dequantise
from edgellm.backends.reference_kv import ReferenceKV

__all__ = ["ReferenceBackend", "ReferenceWeight"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

CHUNK_FLOATS = 1 << 24
"""Weights dequantised at once when they are not kept (64 MB)."""


class ReferenceWeight:
    """A weight and, once used and if it fits, its float32 values."""

    def __init__(self, tensor: QTensor, keep: Callable[[int], bool]):
        self.tensor = tensor
        self.shape = tensor.shape
        self._keep = keep
        self._kept: dict[int, Floats] = {}

    def rows(self, ids: Ints) -> Floats:
        """Rows of the first axis, dequantised."""
        return dequantise(self.tensor.data[ids], self.tensor.type)

    def values(self) -> Floats:
        """All values of a small weight (norms, biases)."""
        return self._matrix(-1, self.tensor.data)

    def matrices(self, expert: int | None = None) -> Iterator[tuple[int, Floats]]:
        """(first row, rows as float32) pieces of the matrix, or of one expert's matrix."""
        data = self.tensor.data if expert is None else self.tensor.data[expert]
        index = -1 if expert is None else expert
        size = data.shape[0] * self.shape[-1]
        if index in self._kept or self._keep(4 * size):
            yield 0, self._matrix(index, data)
            return
        step = max(1, CHUNK_FLOATS // self.shape[-1])
        for start in range(0, data.shape[0], step):
            yield start, dequantise(data[start : start + step], self.tensor.type)

    def _matrix(self, index: int, data: npt.NDArray[np.uint8]) -> Floats:
        if index not in self._kept:
            self._kept[index] = dequantise(data, self.tensor.type)
        return self._kept[index]


class ReferenceBackend(Backend):
    """Numpy arrays are the Arrays; `execute` just calls the model."""

    name = "reference"

    def __init__(self, cache_bytes: int = 2 << 30):
        self.cache_left = cache_bytes

    def load(self, tensor: QTensor) -> ReferenceWeight:
        return ReferenceWeight(tensor, self._keep)

    def _keep(self, nbytes: int) -> bool:
        """Take `nbytes` from what may be kept, if there is enough left."""
        if nbytes > self.cache_left:
            return False
        self.cache_left -= nbytes
        return True

    def new_kv(self, spec: KVSpec, n_blocks: int) -> ReferenceKV:
        return ReferenceKV(spec, n_blocks)

    def execute(self, forward: Callable[[Batch], Floats], batch: Batch) -> Floats:
        return np.array(forward(batch), np.float32)

    def embed(self, table: ReferenceWeight, ids: Ints) -> Floats:
        return table.rows(ids)

    def linear(self, x: Floats, weight: ReferenceWeight, bias: ReferenceWeight | None = None) -> Floats:
        y = _times(x, weight)
        return y if bias is None else y + bias.values()

    def rms_norm(self, x: Floats, weight: ReferenceWeight | None, eps: float) -> Floats:
        y: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
        return y if weight is None else y * weight.values()

    def layer_norm(self, x: Floats, weight: ReferenceWeight | None, bias: ReferenceWeight | None, eps: float) -> Floats:
        centred = x - x.mean(axis=-1, keepdims=True)
        y: Floats = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + np.float32(eps))
        y = y if weight is None else y * weight.values()
        return y if bias is None else y + bias.values()

    def rope(self, x: Floats, batch: Batch, spec: RopeSpec) -> Floats:
        angle = batch.positions[:, None].astype(np.float32) * spec.inv_freq[batch.rope_variants]
        magnitude = spec.magnitude[batch.rope_variants][:, None]
        cos = (np.cos(angle) * magnitude)[:, None, :]
        sin = (np.sin(angle) * magnitude)[:, None, :]
        half = spec.n_dims // 2
        if spec.adjacent:
            first, second = slice(0, spec.n_dims, 2), slice(1, spec.n_dims, 2)
        else:
            first, second = slice(0, half), slice(half, spec.n_dims)
        a, b = x[..., first], x[..., second]
        y = x.copy()
        y[..., first] = a * cos - b * sin
        y[..., second] = a * sin + b * cos
        return y

    def store_kv(self, kv: KVPages, k: Floats, v: Floats, batch: Batch) -> None:
        assert isinstance(kv, ReferenceKV)
        table = batch.block_tables[kv.spec.group]
        for s in range(batch.n_seqs):
            rows = slice(batch.seq_starts[s], batch.seq_starts[s + 1])
            kv.write(table[s], batch.positions[rows], k[rows], v[rows])

    def attention(self, q: Floats, kv: KVPages, batch: Batch, spec: AttentionSpec) -> Floats:
        assert isinstance(kv, ReferenceKV)
        table = batch.block_tables[kv.spec.group]
        out = np.empty((*q.shape[:2], kv.spec.v_dim), np.float32)
        for s in range(batch.n_seqs):
            rows = slice(batch.seq_starts[s], batch.seq_starts[s + 1])
            positions = batch.positions[rows]
            first = max(0, int(positions[0]) - spec.window + 1) if spec.window else 0
            keys, values = kv.read(table[s], first, int(batch.context_lens[s]))
            seen = _visible(positions, first + np.arange(len(keys)), spec)
            out[rows] = _attend(q[rows], keys, values, seen, spec)
        return out

    def activate(self, kind: str, gate: Floats, up: Floats | None = None) -> Floats:
        if kind == "swiglu_oai":
            assert up is not None
            gate, up = np.minimum(gate, np.float32(7)), np.clip(up, -7, 7) + 1
            return gate * _sigmoid(np.float32(1.702) * gate) * up
        y = _ACTIVATIONS[kind](gate)
        return y if up is None else y * up

    def add(self, a: Floats, b: Floats, scale: float = 1.0) -> Floats:
        return a + b if scale == 1.0 else a + np.float32(scale) * b

    def scale(self, x: Floats, factor: float, softcap: float = 0.0) -> Floats:
        return _softcap(x * np.float32(factor), softcap)

    def take(self, x: Floats, rows: Ints) -> Floats:
        return x[rows]

    def route(self, scores: Floats, spec: RouteSpec, bias: ReferenceWeight | None = None) -> tuple[Ints, Floats]:
        """`bias` is added to the scored values (after softmax or sigmoid); it moves the choice, not the weights."""
        scored = _SCORINGS[spec.scoring](scores)
        ranked = scored if bias is None else scored + bias.values()
        if spec.n_groups > 1:
            ranked = _in_best_groups(ranked, spec)
        ids = np.argsort(-ranked, axis=-1, kind="stable")[:, : spec.n_used].astype(np.int32)
        weights = np.take_along_axis(scored, ids, axis=-1)
        if spec.scoring == "softmax_topk":
            weights = _softmax(weights)
        if spec.normalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return ids, weights * np.float32(spec.scale)

    def expert_linear(
        self, x: Floats, weight: ReferenceWeight, ids: Ints, bias: ReferenceWeight | None = None
    ) -> Floats:
        out = np.empty((*ids.shape, weight.shape[1]), np.float32)
        for expert in np.unique(ids):
            rows, slots = np.nonzero(ids == expert)
            out[rows, slots] = _times(x[rows] if x.ndim == 2 else x[rows, slots], weight, int(expert))
        return out if bias is None else out + bias.values()[ids]

    def head_linear(self, x: Floats, weight: ReferenceWeight) -> Floats:
        return np.stack([_times(x[:, head], weight, head) for head in range(x.shape[1])], axis=1)

    def columns(self, x: Floats, start: int, stop: int) -> Floats:
        return x[..., start:stop]

    def concat(self, a: Floats, b: Floats) -> Floats:
        return np.concatenate([a, b], axis=-1)

    def combine(self, x: Floats, weights: Floats) -> Floats:
        out = weights[:, 0, None] * x[:, 0]
        for j in range(1, x.shape[1]):
            out = out + weights[:, j, None] * x[:, j]
        return out


def _in_best_groups(ranked: Floats, spec: RouteSpec) -> Floats:
    """-inf for experts of other groups than the best: those whose highest (softmax), or two highest, add up to most."""
    grouped = ranked.reshape(len(ranked), spec.n_groups, -1)
    counted = 1 if spec.scoring == "softmax" else 2
    worth = np.sort(grouped, axis=-1)[..., -counted:].sum(axis=-1)
    best = np.argsort(-worth, axis=-1, kind="stable")[:, : spec.n_groups_used]
    kept = np.zeros(worth.shape, bool)
    np.put_along_axis(kept, best, True, axis=-1)
    return np.where(kept[..., None], grouped, np.float32(-np.inf)).reshape(ranked.shape)


def _times(x: Floats, weight: ReferenceWeight, expert: int | None = None) -> Floats:
    """x (n, k) times weight (m, k) transposed, the weight taken in pieces when it is not kept."""
    pieces = [x @ matrix.T for _, matrix in weight.matrices(expert)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)


def _visible(positions: Ints, cached: npt.NDArray[np.int64], spec: AttentionSpec) -> npt.NDArray[np.bool_]:
    """Which cached positions each row may see: bool (rows, cached)."""
    distance = positions[:, None] - cached[None, :]
    seen = distance >= 0 if spec.causal else np.ones_like(distance, dtype=bool)
    return seen & (np.abs(distance) < spec.window) if spec.window else seen


def _attend(q: Floats, k: Floats, v: Floats, seen: npt.NDArray[np.bool_], spec: AttentionSpec) -> Floats:
    """One sequence: q (n, n_heads, k_dim), k (t, n_kv_heads, k_dim), v (t, n_kv_heads, v_dim), seen (n, t)."""
    n, n_heads, k_dim = q.shape
    n_kv_heads = k.shape[1]
    grouped = q.reshape(n, n_kv_heads, n_heads // n_kv_heads, k_dim)
    scores = np.einsum("nhgd,thd->nhgt", grouped, k, optimize=True) * np.float32(spec.scale)
    scores = _softcap(scores, spec.softcap).reshape(n, n_heads, -1)
    scores = np.where(seen[:, None, :], scores, np.float32(-np.inf))
    top = scores.max(axis=-1, keepdims=True)
    if spec.sinks is not None:
        sinks = spec.sinks.values()[None, :, None]
        top = np.maximum(top, sinks)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if spec.sinks is not None:
        total = total + np.exp(sinks - top)
    weights = (weights / total).reshape(n, n_kv_heads, -1, len(k))
    out: Floats = np.einsum("nhgt,thd->nhgd", weights, v, optimize=True)
    return out.reshape(n, n_heads, -1)


def _softcap(x: Floats, cap: float) -> Floats:
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap > 0 else x


def _softmax(x: Floats) -> Floats:
    e: Floats = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True), np.float32)


def _sigmoid(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def _gelu(x: Floats) -> Floats:
    erf = np.frompyfunc(math.erf, 1, 1)(x / np.float32(math.sqrt(2))).astype(np.float32)
    return np.asarray(np.float32(0.5) * x * (1 + erf), np.float32)


def _gelu_tanh(x: Floats) -> Floats:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)), np.float32)


_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "relu2": lambda x: np.square(np.maximum(x, np.float32(0))),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "exp_rest": lambda x: np.expm1(np.minimum(x, np.float32(0))) - np.minimum(x, np.float32(0)),
}

_SCORINGS: dict[str, Callable[[Floats], Floats]] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "softmax_topk": lambda scores: scores,
}
