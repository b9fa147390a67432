"""Every CUDA kernel against its definition in numpy (`edgellm.backends.reference`), for bench/cuda_check.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from edgellm.backends.base import AttentionSpec, Batch, GGMLType, KVSpec, QTensor, RopeSpec, RouteSpec
from edgellm.backends.cuda.backend import CUDABackend
from edgellm.backends.cuda.unpack import UNPACK
from edgellm.backends.reference import ReferenceBackend
from edgellm.quants import QUANT_TABLE

__all__ = ["check_kernels", "make_batch", "random_blocks"]

SCALE_AT = {"Q5_K": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
"""Byte offsets of a block's float16 scales, where they are not just (0,)."""
EXACT, ROUNDED = 1e-9, 1e-5
"""Normalised squared errors: float32 sums in another order; values that were rounded to 8 bits on the way."""
Check = tuple[str, Callable[[], float], float]


def random_blocks(kind: GGMLType, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 (n, row_bytes) of random quants with small scales."""
    if kind in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
        values = rng.standard_normal((n, k)).astype(np.float32)
        bits = values.view(np.uint32) >> 16
        narrow = {GGMLType.F32: values, GGMLType.F16: values.astype(np.float16), GGMLType.BF16: bits.astype(np.uint16)}
        return narrow[kind].view(np.uint8).reshape(n, -1)
    info = QUANT_TABLE[kind]
    raw = rng.integers(0, 256, (n, k // info.block_size, info.type_size), dtype=np.uint8)
    if kind is GGMLType.MXFP4:
        raw[..., 0] = 120
        return raw.reshape(n, -1)
    for at in SCALE_AT.get(kind.name, (0,)):
        raw[..., at : at + 2] = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    return raw.reshape(n, -1)


def make_batch(start: int, n: int, table: np.ndarray) -> Batch:
    """One sequence: `n` tokens from position `start` on."""
    return Batch(
        ids=np.arange(n, dtype=np.int32) + 1,
        positions=np.arange(start, start + n, dtype=np.int32),
        seq_starts=np.array([0, n], np.int32),
        context_lens=np.array([start + n], np.int32),
        block_tables=(table,),
        output_rows=np.array([n - 1], np.int32),
        rope_variants=np.zeros(n, np.int32),
    )


class Pair:
    """Both backends side by side: one call, the error of the one against the other."""

    def __init__(self, gpu: CUDABackend, small: bool):
        self.gpu, self.reference, self.prompt = gpu, ReferenceBackend(), 3 if small else 40
        self.rng = np.random.default_rng(1)

    def values(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def exact_rows(self, rows: int, k: int) -> np.ndarray:
        """Activations that rounding to 8 bits per 32 leaves as they are, so that only the product is checked."""
        q = self.rng.integers(-127, 128, (rows, k // 32, 32))
        q[..., 0] = 127
        return (q * self.rng.uniform(0.01, 0.02, (rows, k // 32, 1))).astype(np.float32).reshape(rows, k)

    def weight(self, kind: GGMLType, *shape: int) -> QTensor:
        raw = random_blocks(kind, int(np.prod(shape[:-1])), shape[-1], self.rng)
        return QTensor("w.weight", kind, shape, raw.reshape(*shape[:-1], -1))

    def error(self, op: str, *args: Any) -> float:
        """Run `op` on both; numpy float32 arrays, tensors and specs are handed over as each backend wants them."""
        outs = []
        for backend in (self.gpu, self.reference):
            out = getattr(backend, op)(*(self._given(backend, a) for a in args))
            outs.append([self._host(o) for o in (out if isinstance(out, tuple) else (out,))])
        self.gpu.forget()
        return max(nmse(a, b) for a, b in zip(*outs, strict=True))

    def _given(self, backend: Any, value: Any) -> Any:
        if isinstance(value, QTensor):
            return backend.load(value)
        if isinstance(value, np.ndarray) and value.dtype == np.float32 and backend is self.gpu:
            return self.gpu.array(value)
        return value

    def _host(self, out: Any) -> np.ndarray:
        return out if isinstance(out, np.ndarray) else out.data.copy_to_host()[: out.size].reshape(out.shape)

    def attention(self, kv_type: str, head: int, heads: int, spec: AttentionSpec) -> float:
        """A prompt and a single token behind it, blocks out of order."""
        shape, table = KVSpec(2, head, head, kv_type, 32, 0), np.array([[2, 1, 3]], np.int32)
        pages = [backend.new_kv(shape, 4) for backend in (self.gpu, self.reference)]
        worst = 0.0
        for start, n in ((0, self.prompt), (self.prompt, 1)):
            batch = make_batch(start, n, table)
            k, v, q = self.values(n, 2, head), self.values(n, 2, head), self.values(n, heads, head)
            outs = []
            for backend, kv in zip((self.gpu, self.reference), pages, strict=True):
                backend.store_kv(kv, self._given(backend, k), self._given(backend, v), batch)
                outs.append(self._host(backend.attention(self._given(backend, q), kv, batch, spec)))
            worst = max(worst, nmse(*outs))
            self.gpu.forget()
        return worst


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    """Normalised mean squared error; infinite where something is not finite."""
    error = float(((got - expected.astype(np.float64)) ** 2).mean() / (expected.astype(np.float64) ** 2).mean())
    return error if np.isfinite(error) else float("inf")


def products(pair: Pair, small: bool) -> Iterator[Check]:
    """Every weight type: 1, 3 and 9 rows, experts, embedding rows, half-precision tiles."""
    for kind in (*UNPACK, GGMLType.F16, GGMLType.BF16, GGMLType.F32):
        for rows, n, k in ((1, 5, 256), (3, 7, 512), (9, 65, 256))[: 1 if small else 3]:
            x, w = pair.exact_rows(rows, k), pair.weight(kind, n, k)
            yield f"{kind.name} {rows} x {n} x {k}", lambda x=x, w=w: pair.error("linear", x, w), EXACT
        if small:
            continue
        table = pair.weight(kind, 6, 256)
        yield f"{kind.name} embed", lambda w=table: pair.error("embed", w, np.array([5, 0], np.int32)), EXACT
        x, w = pair.exact_rows(70, 512), pair.weight(kind, 300, 512)
        yield f"{kind.name} prompt", lambda x=x, w=w: pair.error("linear", x, w), ROUNDED
    x, w = pair.exact_rows(2, 256), pair.weight(GGMLType.Q4_K, 3, 5, 256)
    ids = np.array([[2, 0], [1, 1]], np.int32)

    def experts() -> float:
        on_device = pair.gpu.ids(ids)
        got = pair.gpu.expert_linear(pair.gpu.array(x), pair.gpu.load(w), on_device)
        expected = pair.reference.expert_linear(x, pair.reference.load(w), ids)
        pair.gpu.forget()
        return nmse(pair._host(got), expected)

    yield "experts", experts, EXACT


def others(pair: Pair) -> Iterator[Check]:
    """Norms, RoPE, activations, routing, attention."""
    x, wide = pair.values(3, 4, 64), pair.values(3, 200)
    norm, wide_norm = pair.weight(GGMLType.F32, 64), pair.weight(GGMLType.F32, 200)
    yield "rms_norm", lambda: pair.error("rms_norm", x, norm, 1e-5), EXACT
    yield "layer_norm", lambda: pair.error("layer_norm", wide, wide_norm, None, 1e-5), EXACT
    batch = make_batch(37, 3, np.array([[1, 2]], np.int32))
    for adjacent in (True, False):
        spec = RopeSpec(32, adjacent, pair.rng.random((1, 16)).astype(np.float32), np.array([1.1], np.float32))
        yield f"rope adjacent={adjacent}", lambda spec=spec: pair.error("rope", x, batch, spec), EXACT
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "tanh", "swiglu_oai"):
        yield kind, lambda kind=kind: pair.error("activate", kind, wide, wide), EXACT
    yield "add", lambda: pair.error("add", wide, wide, 0.5), EXACT
    yield "scale", lambda: pair.error("scale", wide, 0.5, 30.0), EXACT
    yield "take", lambda: pair.error("take", wide, batch.output_rows), EXACT
    yield "combine", lambda: pair.error("combine", x, x[:, :, 0].copy()), EXACT
    scores = pair.values(3, 16)
    for scoring in ("softmax", "softmax_topk", "sigmoid"):
        yield f"route {scoring}", lambda s=scoring: pair.error("route", scores, RouteSpec(4, s)), EXACT
    for kv_type, limit in (("f16", 1e-6), ("q8_0", 1e-4), ("f32", EXACT)):
        for head, heads, window, cap in ((64, 8, 0, 0.0), (128, 2, 17, 30.0)):
            spec = AttentionSpec(0.1, window, cap)
            name = f"attention {kv_type} head {head} window {window}"
            yield name, lambda t=kv_type, a=head, b=heads, s=spec: pair.attention(t, a, b, s), limit


def check_kernels(gpu: CUDABackend, small: bool = False) -> list[tuple[str, float, float]]:
    """(name, error, limit) of every check. `small`: one shape per type, for the simulator."""
    pair = Pair(gpu, small)
    return [(name, run(), limit) for checks in (products(pair, small), others(pair)) for name, run, limit in checks]
