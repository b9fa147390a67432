"""The CUDA backend: the op set as numba-cuda kernels; weights stay as the file's bytes in device memory.

Products with block types quantise the activations to int8 once per input (matmul.py); F32, F16 and BF16 weights
multiply float32 activations. Kernels are compiled on first use per type and shape."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cuda

from edgellm.backends import dequant
from edgellm.backends.base import (
    Array,
    AttentionSpec,
    Backend,
    Batch,
    GGMLType,
    Int32Array,
    KVPages,
    KVSpec,
    QTensor,
    RopeSpec,
    RouteSpec,
    Weight,
)
from edgellm.backends.cuda import elementwise as ew
from edgellm.backends.cuda import matmul as mm
from edgellm.backends.cuda.arrays import CudaArray, CudaKV, CudaWeight, Pool
from edgellm.backends.cuda.attention import PARTITION, combine_partitions, make_partial
from edgellm.backends.cuda.device import SIMULATED
from edgellm.backends.cuda.unpack import UNPACK
from edgellm.errors import BackendUnavailable
from edgellm.quants import QUANT_TABLE

__all__ = ["CUDABackend"]

log = logging.getLogger(__name__)

DENSE = {GGMLType.F32: 0, GGMLType.F16: 1, GGMLType.BF16: 2}
FEW_ROWS = 8
"""Rows a matvec takes; more go through the tiled kernel."""
THREADS = 128


@cache
def _matmul_kernel(name: str, kind: GGMLType, *extra: int) -> Any:
    info = QUANT_TABLE[kind]
    make = {"matvec": mm.make_matvec, "tiled": mm.make_tiled, "expert": mm.make_expert_matvec, "embed": ew.make_embed}
    return make[name](UNPACK[kind], info.block_size, info.type_size, *extra)


_partial_kernel = cache(make_partial)
_activate_kernel = cache(ew.make_activate)
_dense_kernel = cache(ew.dense_matvec)
_embed_dense_kernel = cache(ew.make_embed_dense)


def _blocks(n: int, per_block: int = THREADS) -> int:
    return max(1, -(-n // per_block))


class CUDABackend(Backend):
    """One NVIDIA GPU, or numba-cuda's simulator (NUMBA_ENABLE_CUDASIM=1)."""

    name = "cuda"

    def __init__(self) -> None:
        if not SIMULATED and not cuda.is_available():
            raise BackendUnavailable("the cuda backend found no NVIDIA GPU (no CUDA driver); use --backend cpu")
        self._pool = Pool()
        self._none = cuda.device_array(0, np.float32)
        self._no_ids = cuda.device_array(0, np.int32)
        self._uploads: dict[int, tuple[Any, Any]] = {}
        self._quantised: dict[int, tuple[CudaArray, tuple[Any, Any, Any]]] = {}

    def load(self, tensor: QTensor) -> CudaWeight:
        kind, data = tensor.type, np.ascontiguousarray(tensor.data).reshape(-1)
        if kind not in UNPACK and kind not in DENSE:
            log.warning("%s: the cuda backend has no kernel for %s; kept as F16 instead", tensor.name, kind.name)
            values = dequant.dequantise(tensor.data, kind).astype(np.float16)
            kind, data = GGMLType.F16, values.reshape(-1).view(np.uint8)
        small = len(tensor.shape) == 1 or tensor.name.endswith(".bias")
        dense = dequant.dequantise(tensor.data, tensor.type).astype(np.float32).reshape(-1) if small else None
        return CudaWeight(kind, tensor.shape, cuda.to_device(data), None if dense is None else cuda.to_device(dense))

    def new_kv(self, spec: KVSpec, n_blocks: int) -> CudaKV:
        return CudaKV(spec, n_blocks)

    def execute(self, forward: Callable[[Batch], Array], batch: Batch) -> npt.NDArray[np.float32]:
        try:
            out = forward(batch)
            return np.array(out.data.copy_to_host(), np.float32).reshape(out.shape)
        finally:
            self._uploads.clear()
            self._quantised.clear()

    def _up(self, array: npt.NDArray[Any]) -> Any:
        """A batch field on the device, sent once a step."""
        held = self._uploads.get(id(array))
        if held is None:
            held = (array, cuda.to_device(np.ascontiguousarray(array).reshape(-1)))
            self._uploads[id(array)] = held
        return held[1]

    def _int8(self, x: CudaArray) -> tuple[Any, Any, Any]:
        """(xq, xd, xs) of matmul.py, made once per input."""
        held = self._quantised.get(id(x))
        if held is None:
            groups = x.size // 32
            xq, xd = self._pool.take((x.size,), "int8"), self._pool.take((groups,))
            xs = self._pool.take((2 * groups,))
            mm.quantize_rows[_blocks(groups), THREADS](x.data, xq.data, xd.data, xs.data, groups)
            held = (x, (xq, xd, xs))
            self._quantised[id(x)] = held
        xq, xd, xs = held[1]
        return xq.data.view(np.uint8), xd.data, xs.data

    # Ops: shapes and meaning in backends/base.py.
    def embed(self, table: Weight, ids: Int32Array) -> Array:
        dim = table.shape[-1]
        y = self._pool.take((len(ids), dim))
        if table.kind in DENSE:
            total, kernel = y.size, _embed_dense_kernel(DENSE[table.kind])
        else:
            total, kernel = y.size // 32, _matmul_kernel("embed", table.kind)
        kernel[_blocks(total), THREADS](table.data, self._up(ids), y.data, dim, total)
        return y

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        (m, k), n = x.shape, weight.shape[0]
        y = self._pool.take((m, n))
        if weight.kind in DENSE:
            kernel, grid = _dense_kernel(DENSE[weight.kind]), (_blocks(n, 4), m)
            kernel[grid, THREADS](weight.data, self._no_ids, 1, x.data, y.data, n, k)
        elif m <= FEW_ROWS:
            _matmul_kernel("matvec", weight.kind, m)[_blocks(n, mm.WARPS), 32 * mm.WARPS](
                weight.data, *self._int8(x), y.data, n, k
            )
        else:
            grid = (_blocks(n, mm.TILE), _blocks(m, mm.TILE))
            _matmul_kernel("tiled", weight.kind)[grid, (16, 16)](weight.data, *self._int8(x), y.data, m, n, k)
        if bias is not None:
            ew.add_bias[_blocks(y.size), THREADS](y.data, bias.dense, self._no_ids, n, y.size)
        return y

    def rms_norm(self, x: Array, weight: Weight | None, eps: float) -> Array:
        y, d = self._pool.take(x.shape), x.shape[-1]
        rows = x.size // d
        w, w_rows = self._row_weight(weight, d)
        ew.rms_norm[_blocks(rows, 4), THREADS](x.data, w, y.data, rows, d, w_rows, eps)
        return y

    def layer_norm(self, x: Array, weight: Weight | None, bias: Weight | None, eps: float) -> Array:
        y, d = self._pool.take(x.shape), x.shape[-1]
        rows = x.size // d
        (w, w_rows), (b, b_rows) = self._row_weight(weight, d), self._row_weight(bias, d)
        ew.layer_norm[_blocks(rows, 4), THREADS](x.data, w, b, y.data, rows, d, w_rows, b_rows, eps)
        return y

    def _row_weight(self, weight: CudaWeight | None, d: int) -> tuple[Any, int]:
        """(float32 values, rows) of a norm weight."""
        if weight is None:
            return self._none, 0
        values = weight.dense if weight.dense is not None else weight.data.view(np.float32)
        return values, values.size // d

    def rope(self, x: Array, batch: Batch, spec: RopeSpec) -> Array:
        y = self._pool.take(x.shape)
        _, heads, d = x.shape
        tables = self._up(spec.inv_freq), self._up(spec.magnitude)
        ew.rope[_blocks(x.size), THREADS](
            *(x.data, self._up(batch.positions), self._up(batch.rope_variants), *tables, y.data),
            *(heads, d, spec.n_dims, spec.adjacent, x.size),
        )
        return y

    def _seqs(self, batch: Batch) -> Int32Array:
        return np.repeat(np.arange(batch.n_seqs, dtype=np.int32), np.diff(batch.seq_starts))

    def store_kv(self, kv: KVPages, k: Array, v: Array, batch: Batch) -> None:
        assert isinstance(kv, CudaKV)
        size, table = kv.spec.block_size, batch.block_tables[kv.spec.group]
        slots = table[self._seqs(batch), batch.positions // size] * size + batch.positions % size
        on_device = cuda.to_device(slots.astype(np.int32))
        for x, cache_, scales in ((k, kv.k, kv.ks), (v, kv.v, kv.vs)):
            row = x.size // x.shape[0]
            if kv.quantised:
                groups = x.size // 32
                ew.store_q8[_blocks(groups), THREADS](x.data, on_device, cache_, scales, row, groups)
            else:
                ew.store_rows[_blocks(x.size), THREADS](x.data, on_device, cache_, row, x.size)

    def attention(self, q: Array, kv: KVPages, batch: Batch, spec: AttentionSpec) -> Array:
        assert isinstance(kv, CudaKV)
        (rows, heads, _), shape = q.shape, kv.spec
        table = batch.block_tables[shape.group]
        parts = _blocks(int(batch.context_lens.max()), PARTITION)
        sums, stats = self._pool.take((rows, heads, parts, shape.v_dim)), self._pool.take((rows, heads, parts, 2))
        kernel = _partial_kernel(shape.k_dim, shape.v_dim, heads // shape.n_kv_heads, kv.quantised)
        kernel[(parts, shape.n_kv_heads, rows), 32](
            *(q.data, kv.k, kv.v, kv.ks, kv.vs, self._up(table), table.shape[1]),
            *(self._up(batch.positions), cuda.to_device(self._seqs(batch)), self._up(batch.context_lens)),
            *(shape.block_size, spec.window, spec.causal, spec.scale, spec.softcap, sums.data, stats.data),
        )
        out = self._pool.take((rows, heads, shape.v_dim))
        sinks = self._none if spec.sinks is None else spec.sinks.dense
        combine_partitions[_blocks(out.size), THREADS](
            sums.data, stats.data, sinks, out.data, heads, parts, shape.v_dim, out.size
        )
        return out

    def activate(self, kind: str, gate: Array, up: Array | None = None) -> Array:
        y = self._pool.take(gate.shape)
        other = gate if up is None else up
        _activate_kernel(kind, up is not None)[_blocks(y.size), THREADS](gate.data, other.data, y.data, y.size)
        return y

    def add(self, a: Array, b: Array, scale: float = 1.0) -> Array:
        y = self._pool.take(a.shape)
        ew.add[_blocks(y.size), THREADS](a.data, b.data, scale, y.data, y.size)
        return y

    def scale(self, x: Array, factor: float, softcap: float = 0.0) -> Array:
        y = self._pool.take(x.shape)
        ew.scale[_blocks(y.size), THREADS](x.data, factor, softcap, y.data, y.size)
        return y

    def take(self, x: Array, rows: Int32Array) -> Array:
        y = self._pool.take((len(rows), x.shape[-1]))
        ew.take[_blocks(y.size), THREADS](x.data, self._up(rows), y.data, x.shape[-1], y.size)
        return y

    def route(self, scores: Array, spec: RouteSpec, bias: Weight | None = None) -> tuple[Array, Array]:
        n, n_experts = scores.shape
        ids, weights = self._pool.take((n, spec.n_used), "int32"), self._pool.take((n, spec.n_used))
        mode = {"softmax": 0, "softmax_topk": 1, "sigmoid": 2}[spec.scoring]
        work = self.scale(scores, 1.0)  # the kernel works in place
        extra = self._none if bias is None else bias.dense
        ew.route[_blocks(n), THREADS](
            work.data, extra, ids.data, weights.data, n, n_experts, spec.n_used, mode, spec.normalise, spec.scale
        )
        return ids, weights

    def expert_linear(self, x: Array, weight: Weight, ids: Array, bias: Weight | None = None) -> Array:
        (t, n_used), n, k = ids.shape, weight.shape[1], x.shape[-1]
        share, pairs = (n_used if len(x.shape) == 2 else 1), t * n_used
        y = self._pool.take((t, n_used, n))
        if weight.kind in DENSE:
            kernel = _dense_kernel(DENSE[weight.kind])
            kernel[(_blocks(n, 4), pairs), THREADS](weight.data, ids.data, share, x.data, y.data, n, k)
        else:
            kernel = _matmul_kernel("expert", weight.kind)
            grid = (_blocks(n, mm.WARPS), pairs)
            kernel[grid, 32 * mm.WARPS](weight.data, ids.data, share, *self._int8(x), y.data, n, k)
        if bias is not None:
            values, _ = self._row_weight(bias, n)
            ew.add_bias[_blocks(y.size), THREADS](y.data, values, ids.data, n, y.size)
        return y

    def combine(self, x: Array, weights: Array) -> Array:
        t, n_used, m = x.shape
        y = self._pool.take((t, m))
        ew.combine[_blocks(y.size), THREADS](x.data, weights.data, y.data, n_used, m, y.size)
        return y
