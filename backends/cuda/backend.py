"""The CUDA backend: the op set as numba-cuda kernels; weights stay as the file's bytes in device memory.

Products with block types quantise the activations to int8 once per input (matmul.py); F32, F16 and BF16 weights
multiply float32 activations (dense.py); prompts go through cuBLAS in half precision where it is installed (half.py).
Kernels are compiled on first use per type and shape. All work goes to the default stream, in order; a step waits once,
for its result."""

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
from edgellm.backends.cuda import dense
from edgellm.backends.cuda import elementwise as ew
from edgellm.backends.cuda import matmul as mm
from edgellm.backends.cuda.arrays import CudaArray, CudaKV, CudaWeight, Pool
from edgellm.backends.cuda.attention import combine_partitions, heads_per_warp, make_partial, partition_length
from edgellm.backends.cuda.device import SIMULATED
from edgellm.backends.cuda.half import HalfProduct, find_cublas
from edgellm.backends.cuda.step import Crossing
from edgellm.backends.cuda.unpack import UNPACK
from edgellm.errors import BackendUnavailable
from edgellm.quants import QUANT_TABLE

__all__ = ["CUDABackend"]

log = logging.getLogger(__name__)

DENSE = {GGMLType.F32: 0, GGMLType.F16: 1, GGMLType.BF16: 2}
FEW_ROWS = 8
"""Rows a matvec takes; more go through the tiled kernel."""
HALF_ROWS = 64
"""From here on a product pays for turning its weights into half precision."""
HALF_TILE = 32 << 20
"""Bytes of half-precision weights made at a time."""
THREADS = 128
f32 = np.float32


@cache
def _matmul_kernel(name: str, kind: GGMLType, *extra: int) -> Any:
    info = QUANT_TABLE[kind]
    make = {"matvec": mm.make_matvec, "tiled": mm.make_tiled, "expert": mm.make_expert_matvec}
    return make[name](UNPACK[kind], info.block_size, info.type_size, *extra)


@cache
def _embed_kernel(kind: GGMLType) -> Any:
    info = QUANT_TABLE[kind]
    if kind in DENSE:
        return dense.make_embed_dense(DENSE[kind])
    return dense.make_embed(UNPACK[kind], info.block_size, info.type_size)


_partial_kernel = cache(make_partial)
_activate_kernel = cache(ew.make_activate)
_dense_kernel = cache(dense.make_dense_matvec)


def _blocks(n: int, per_block: int = THREADS) -> int:
    return max(1, -(-n // per_block))


class CUDABackend(Backend):
    """One NVIDIA GPU, or numba-cuda's simulator (NUMBA_ENABLE_CUDASIM=1)."""

    name = "cuda"

    def __init__(self, half: HalfProduct | None = None) -> None:
        """`half`: the library for prompts; None: cuBLAS where there is one. Raises BackendUnavailable."""
        check_device()
        self._pool = Pool()
        self._none = cuda.device_array(0, np.float32)
        self._no_ids = cuda.device_array(0, np.int32)
        self._crossing = Crossing()
        self._constants: dict[int, tuple[Any, Any]] = {}
        self._quantised: dict[int, tuple[CudaArray, tuple[Any, Any]]] = {}
        found: HalfProduct | str = half or ("the simulator has no cuBLAS" if SIMULATED else find_cublas())
        self.half = None if isinstance(found, str) else found
        self._prompts = f"own int8 kernel ({found})" if isinstance(found, str) else found.name

    def load(self, tensor: QTensor) -> CudaWeight:
        kind, data = tensor.type, np.ascontiguousarray(tensor.data).reshape(-1)
        if kind not in UNPACK and kind not in DENSE:
            log.warning("%s: the cuda backend has no kernel for %s; kept as F16 instead", tensor.name, kind.name)
            values = dequant.dequantise(tensor.data, kind).astype(np.float16)
            kind, data = GGMLType.F16, values.reshape(-1).view(np.uint8)
        small = len(tensor.shape) == 1 or tensor.name.endswith(".bias")
        values32 = dequant.dequantise(tensor.data, tensor.type).astype(np.float32).reshape(-1) if small else None
        on_device = None if values32 is None else cuda.to_device(values32)
        return CudaWeight(kind, tensor.shape, cuda.to_device(data), on_device)

    def new_kv(self, spec: KVSpec, n_blocks: int) -> CudaKV:
        return CudaKV(spec, n_blocks)

    def execute(self, forward: Callable[[Batch], Array], batch: Batch) -> npt.NDArray[np.float32]:
        try:
            self._crossing.send(batch)
            out = forward(batch)
            return self._crossing.fetch(out.data, out.size).reshape(out.shape)
        finally:
            self.forget()

    def forget(self) -> None:
        """End of a step: what was made from its inputs is given back."""
        self._crossing.forget()
        self._quantised.clear()

    def free_bytes(self) -> int | None:
        """The card's free memory, less a part that the driver and fragments take."""
        return None if SIMULATED else int(cuda.current_context().get_memory_info()[0] * 0.95)

    def weight_bytes(self, tensor: QTensor) -> int:
        has_kernel = tensor.type in UNPACK or tensor.type in DENSE
        return int(tensor.data.nbytes if has_kernel else 2 * np.prod(tensor.shape))

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "device": device_name(), "prompt_matmul": self._prompts}

    def array(self, values: npt.NDArray[np.float32]) -> CudaArray:
        """Host values as an activation."""
        y = self._pool.take(values.shape)
        y.data[: y.size].copy_to_device(np.ascontiguousarray(values, np.float32).reshape(-1))
        return y

    def ids(self, values: Int32Array) -> CudaArray:
        """Chosen experts as `route` gives them."""
        y = self._pool.take(values.shape, "int32")
        y.data[: y.size].copy_to_device(np.ascontiguousarray(values, np.int32).reshape(-1))
        return y

    def _constant(self, array: npt.NDArray[Any]) -> Any:
        """A model's own table on the device, sent once."""
        if id(array) not in self._constants:
            self._constants[id(array)] = array, cuda.to_device(np.ascontiguousarray(array).reshape(-1))
        return self._constants[id(array)][1]

    def _int8(self, x: CudaArray) -> tuple[Any, Any]:
        """(xq, xm) of matmul.py, made once per input."""
        held = self._quantised.get(id(x))
        if held is None:
            xq, xm = self._pool.take((x.size,), "int8"), self._pool.take((x.size // 8,))
            mm.quantize_rows[_blocks(x.size), THREADS](x.data, xq.data, xm.data, x.size)
            held = self._quantised[id(x)] = x, (xq, xm)
        xq, xm = held[1]
        return xq.data.view(np.uint8), xm.data.view(np.uint8)

    # Ops: shapes and meaning in backends/base.py.
    def embed(self, table: Weight, ids: Int32Array) -> Array:
        dim = table.shape[-1]
        y = self._pool.take((len(ids), dim))
        total = y.size if table.kind in DENSE else y.size // 32
        grid = _blocks(total)
        _embed_kernel(table.kind)[grid, THREADS](table.data, self._crossing.field(ids), 0, y.data, dim, total)
        return y

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        (m, k), n = x.shape, weight.shape[0]
        y = self._pool.take((m, n))
        if not m:
            return y
        if m >= HALF_ROWS and self.half is not None and weight.kind is not GGMLType.F32:
            self._half_linear(x, weight, y)
        elif weight.kind in DENSE:
            rows = min(m, dense.DENSE_ROWS)
            kernel, n_blocks = _dense_kernel(DENSE[weight.kind], rows, k % 8 == 0), _blocks(n, 4) * _blocks(m, rows)
            kernel[n_blocks, THREADS](weight.data, self._no_ids, 1, x.data.view(np.uint8), y.data, m, n, k)
        elif m <= FEW_ROWS:
            kernel = _matmul_kernel("matvec", weight.kind, m)
            kernel[_blocks(n, mm.WARPS), 32 * mm.WARPS](weight.data, *self._int8(x), y.data, n, k)
        else:
            grid = (_blocks(n, mm.TILE), _blocks(m, mm.TILE))
            _matmul_kernel("tiled", weight.kind)[grid, (16, 16)](weight.data, *self._int8(x), y.data, m, n, k)
        if bias is not None:
            ew.add_bias[_blocks(y.size), THREADS](y.data, bias.dense, self._no_ids, n, y.size)
        return y

    def _half_linear(self, x: CudaArray, weight: CudaWeight, y: CudaArray) -> None:
        """y = x W^T through half-precision tiles of W, some rows at a time."""
        assert self.half is not None
        (m, k), n = x.shape, weight.shape[0]
        tile = min(n, max(1, HALF_TILE // (2 * k)))
        half_x, largest = self._pool.take((m, k), "float16"), self._pool.take((m,))
        dense.half_rows[_blocks(m, 4), THREADS](x.data, half_x.data, largest.data, m, k)
        half_w, kernel = self._pool.take((tile, k), "float16"), _embed_kernel(weight.kind)
        for first in range(0, n, tile):
            rows = min(tile, n - first)
            total = rows * k if weight.kind in DENSE else rows * k // 32
            kernel[_blocks(total), THREADS](weight.data, self._no_ids, first, half_w.data, k, total)
            self.half.multiply(half_w.data, half_x.data, y.data, first, rows, n, m, k)
        dense.scale_rows[_blocks(y.size), THREADS](y.data, largest.data, n, y.size)

    def rms_norm(self, x: Array, weight: Weight | None, eps: float) -> Array:
        y, d = self._pool.take(x.shape), x.shape[-1]
        rows = x.size // d
        w, w_rows = self._row_weight(weight, d)
        ew.rms_norm[_blocks(rows, 4), THREADS](x.data, w, y.data, rows, d, w_rows, f32(eps))
        return y

    def layer_norm(self, x: Array, weight: Weight | None, bias: Weight | None, eps: float) -> Array:
        y, d = self._pool.take(x.shape), x.shape[-1]
        rows = x.size // d
        (w, w_rows), (b, b_rows) = self._row_weight(weight, d), self._row_weight(bias, d)
        ew.layer_norm[_blocks(rows, 4), THREADS](x.data, w, b, y.data, rows, d, w_rows, b_rows, f32(eps))
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
        tables = self._constant(spec.inv_freq), self._constant(spec.magnitude)
        positions, variants = self._crossing.field(batch.positions), self._crossing.field(batch.rope_variants)
        ew.rope[_blocks(x.size), THREADS](
            *(x.data, positions, variants, *tables, y.data),
            *(heads, d, spec.n_dims, spec.adjacent, x.size),
        )
        return y

    def _table(self, kv: CudaKV, batch: Batch) -> tuple[Any, int]:
        """The block table of a cache's group, and its width."""
        table = batch.block_tables[kv.spec.group]
        return self._crossing.field(table), table.shape[1]

    def store_kv(self, kv: KVPages, k: Array, v: Array, batch: Batch) -> None:
        assert isinstance(kv, CudaKV)
        seqs, positions = self._crossing.seqs(batch), self._crossing.field(batch.positions)
        where = *self._table(kv, batch), positions, seqs, kv.spec.block_size
        k_row, v_row = k.size // k.shape[0], v.size // v.shape[0]
        if not kv.quantised:
            total = k.size + v.size
            ew.store_rows[_blocks(total), THREADS](k.data, v.data, kv.k, kv.v, *where, k_row, v_row, total)
            return
        for x, pages, scales, row in ((k, kv.k, kv.ks, k_row), (v, kv.v, kv.vs, v_row)):
            ew.store_q8[_blocks(x.size // 32), THREADS](x.data, pages, scales, *where, row, x.size // 32)

    def attention(self, q: Array, kv: KVPages, batch: Batch, spec: AttentionSpec) -> Array:
        assert isinstance(kv, CudaKV)
        (rows, heads, _), shape = q.shape, kv.spec
        longest = int(batch.context_lens.max())
        length = partition_length(rows, longest)
        parts, group = _blocks(longest, length), heads // shape.n_kv_heads
        held = heads_per_warp(group, max(shape.k_dim, shape.v_dim))
        sums, stats = self._pool.take((rows, heads, parts, shape.v_dim)), self._pool.take((rows, heads, parts, 2))
        seqs, positions = self._crossing.seqs(batch), self._crossing.field(batch.positions)
        kernel = _partial_kernel(shape.k_dim, shape.v_dim, held, shape.block_size, kv.quantised)
        kernel[(parts, heads // held, rows), 32](
            *(q.data, kv.k, kv.v, kv.ks, kv.vs, *self._table(kv, batch), positions, seqs),
            *(self._crossing.field(batch.context_lens), length, group // held, spec.window, spec.causal),
            *(f32(spec.scale), f32(spec.softcap), sums.data, stats.data),
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
        ew.add[_blocks(y.size), THREADS](a.data, b.data, f32(scale), y.data, y.size)
        return y

    def scale(self, x: Array, factor: float, softcap: float = 0.0) -> Array:
        y = self._pool.take(x.shape)
        ew.scale[_blocks(y.size), THREADS](x.data, f32(factor), f32(softcap), y.data, y.size)
        return y

    def take(self, x: Array, rows: Int32Array) -> Array:
        y = self._pool.take((len(rows), x.shape[-1]))
        ew.take[_blocks(y.size), THREADS](x.data, self._crossing.field(rows), y.data, x.shape[-1], y.size)
        return y

    def route(self, scores: Array, spec: RouteSpec, bias: Weight | None = None) -> tuple[Array, Array]:
        n, n_experts = scores.shape
        ids, weights = self._pool.take((n, spec.n_used), "int32"), self._pool.take((n, spec.n_used))
        mode = {"softmax": 0, "softmax_topk": 1, "sigmoid": 2}[spec.scoring]
        work = self.scale(scores, 1.0)  # the kernel works in place
        extra = self._none if bias is None else bias.dense
        ew.route[_blocks(n), THREADS](
            *(work.data, extra, ids.data, weights.data, n, n_experts, spec.n_used, mode, spec.normalise),
            *(f32(spec.scale), spec.n_groups, spec.n_groups_used),
        )
        return ids, weights

    def expert_linear(self, x: Array, weight: Weight, ids: Array, bias: Weight | None = None) -> Array:
        (t, n_used), n, k = ids.shape, weight.shape[1], x.shape[-1]
        share, pairs = (n_used if len(x.shape) == 2 else 1), t * n_used
        y = self._pool.take((t, n_used, n))
        if not pairs:
            return y
        if weight.kind in DENSE:
            kernel, grid = _dense_kernel(DENSE[weight.kind], 1, k % 8 == 0), _blocks(n, 4) * pairs
            kernel[grid, THREADS](weight.data, ids.data, share, x.data.view(np.uint8), y.data, pairs, n, k)
        else:
            kernel = _matmul_kernel("expert", weight.kind)
            grid = _blocks(n, mm.WARPS) * pairs
            kernel[grid, 32 * mm.WARPS](weight.data, ids.data, share, *self._int8(x), y.data, n, k)
        if bias is not None:
            values, _ = self._row_weight(bias, n)
            ew.add_bias[_blocks(y.size), THREADS](y.data, values, ids.data, n, y.size)
        return y

    def head_linear(self, x: Array, weight: Weight) -> Array:
        n, heads, _ = x.shape
        return self.expert_linear(x, weight, self.ids(np.tile(np.arange(heads, dtype=np.int32), (n, 1))))

    def columns(self, x: Array, start: int, stop: int) -> Array:
        y = self._pool.take((*x.shape[:-1], stop - start))
        ew.columns[_blocks(y.size), THREADS](x.data, y.data, x.shape[-1], start, stop - start, y.size)
        return y

    def concat(self, a: Array, b: Array) -> Array:
        n_a, n_b = a.shape[-1], b.shape[-1]
        y = self._pool.take((*a.shape[:-1], n_a + n_b))
        ew.concat[_blocks(y.size), THREADS](a.data, b.data, y.data, n_a, n_b, y.size)
        return y

    def combine(self, x: Array, weights: Array) -> Array:
        t, n_used, m = x.shape
        y = self._pool.take((t, m))
        ew.combine[_blocks(y.size), THREADS](x.data, weights.data, y.data, n_used, m, y.size)
        return y


def check_device() -> None:
    """Raise BackendUnavailable, naming what is missing, unless kernels can run here."""
    if SIMULATED or cuda.is_available():
        return
    reason = " ".join(str(cuda.cuda_error() or "").split())
    if reason or not len(cuda.gpus):
        detail = f" ({reason[:120]})" if reason else ""
        raise BackendUnavailable(f"the cuda backend found no NVIDIA GPU or driver{detail}; use --backend cpu")
    raise BackendUnavailable(
        "the cuda backend found a GPU but not NVIDIA's compiler libraries: pip install 'numba-cuda[cu13]'"
    )


def device_name() -> str:
    """The card's name."""
    if SIMULATED:
        return "numba-cuda's simulator"
    name = cuda.get_current_device().name
    return name.decode() if isinstance(name, bytes) else str(name)
