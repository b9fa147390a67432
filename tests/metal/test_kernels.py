"""The shipped Metal text, run on this CPU: values against the gguf package, memory checks, reads counted."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")
if shutil.which("g++") is None:
    pytest.skip("g++ is not installed: the Metal text cannot be run on this CPU", allow_module_level=True)

from edgellm.backends.base import AttentionSpec, Batch, KVSpec  # noqa: E402
from edgellm.backends.metal.attention_kernels import AttentionKernels  # noqa: E402
from edgellm.backends.metal.attention_ops import attention_ops  # noqa: E402
from edgellm.backends.metal.kernels import KERNEL_TYPES, MatmulKernels  # noqa: E402
from edgellm.backends.metal.kv import MetalKV  # noqa: E402
from edgellm.quants import QUANT_TABLE, GGMLType  # noqa: E402
from tests.metal.blocks import dequantized, nmse, random_weights  # noqa: E402
from tests.metal.harness import CpuKernel, check_spaces, maker  # noqa: E402

SEED = 7
TYPES = sorted(KERNEL_TYPES)


def clean(made: list[CpuKernel]) -> None:
    for kernel in made:
        assert not kernel.findings, kernel.findings
        assert not kernel.warnings, kernel.warnings
        assert not check_spaces(kernel.code)


def block_k(kind: GGMLType) -> int:
    return max(256, QUANT_TABLE[kind].block_size)


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_matvec_equals_dequantised_product(kind: GGMLType) -> None:
    rng = np.random.default_rng(SEED)
    made: list[CpuKernel] = []
    kernels = MatmulKernels(maker(made))
    for k, n, m in ((256, 1, 1), (1280, 5, 3)):
        raw = random_weights(kind, n, k, rng)
        x = rng.standard_normal((m, k)).astype(np.float32)
        y = np.array(kernels.matvec(mx.array(raw), kind, mx.array(x)))
        assert nmse(y, x @ dequantized(raw, kind).T) < 1e-10, (k, n, m)
    clean(made)


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_matvec_reads_each_byte_once_and_nothing_else(kind: GGMLType) -> None:
    rng = np.random.default_rng(SEED)
    made: list[CpuKernel] = []
    n, m = 3, 2
    k = block_k(kind)
    raw = random_weights(kind, n, k, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    MatmulKernels(maker(made, mode="trace")).matvec(mx.array(raw), kind, mx.array(x))
    assert not made[0].findings, made[0].findings
    info = QUANT_TABLE[kind]
    reads = made[0].counts["w"].reshape(-1, info.type_size)
    assert reads.min() >= 1
    assert np.median(reads) == 1, "quants are read once; only scales are shared by lanes"


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_dequantise_and_experts(kind: GGMLType) -> None:
    rng = np.random.default_rng(SEED)
    made: list[CpuKernel] = []
    kernels = MatmulKernels(maker(made))
    n, k, experts = 3, block_k(kind), 4
    raw = np.stack([random_weights(kind, n, k, rng) for _ in range(experts)])
    weights = np.stack([dequantized(r, kind) for r in raw])
    half = np.array(kernels.dequantize_half(mx.array(raw[0]), kind, k)).astype(np.float64)
    assert nmse(half, weights[0]) < 1e-6
    ids = np.array([[2, 0], [3, 3]])
    shared = rng.standard_normal((2, k)).astype(np.float32)
    own = rng.standard_normal((2, 2, k)).astype(np.float32)
    y = np.array(kernels.expert_matvec(mx.array(raw), kind, mx.array(shared), mx.array(ids)))
    assert nmse(y, np.einsum("tk,tjnk->tjn", shared, weights[ids])) < 1e-10
    y = np.array(kernels.expert_matvec(mx.array(raw), kind, mx.array(own), mx.array(ids)))
    assert nmse(y, np.einsum("tjk,tjnk->tjn", own, weights[ids])) < 1e-10
    clean(made)


@pytest.mark.parametrize("mode", ["plain", "trace"])
@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize(("dim", "group", "window", "softcap"), [(64, 3, 0, 0.0), (96, 2, 37, 20.0)])
def test_paged_attention_equals_its_ops_twin(
    mode: str, kv_type: str, dim: int, group: int, window: int, softcap: float
) -> None:
    rng = np.random.default_rng(SEED)
    made: list[CpuKernel] = []
    heads, size = 2, 32
    kv = MetalKV(KVSpec(heads, dim, dim, kv_type, size, 0), 24)
    slots = mx.arange(24 * size)
    for rows in (kv.k, kv.v):
        rows.write(slots, mx.array(rng.standard_normal((24 * size, heads, dim)).astype(np.float32)))
    table = rng.permutation(23).astype(np.int32)[None, :22].repeat(2, 0) + 1
    table[1] = table[1, ::-1]
    batch = Batch(
        ids=np.zeros(3, np.int32),
        positions=np.array([299, 4, 5], np.int32),
        seq_starts=np.array([0, 1, 3], np.int32),
        context_lens=np.array([300, 6], np.int32),
        block_tables=(table,),
        output_rows=np.arange(3, dtype=np.int32),
        rope_variants=np.zeros(3, np.int32),
    )
    q = mx.array(rng.standard_normal((3, heads * group, dim)).astype(np.float32))
    spec = AttentionSpec(scale=dim**-0.5, window=window, softcap=softcap)
    got = AttentionKernels(maker(made, mode=mode))(q, kv, batch, spec)
    assert nmse(np.array(got), np.array(attention_ops(q, kv, batch, spec))) < 1e-10
    assert not [f for kernel in made for f in kernel.findings]


def test_attention_sinks_take_probability() -> None:
    class Sinks:
        dense = mx.array([0.5, -1.0])

    rng = np.random.default_rng(SEED)
    kv = MetalKV(KVSpec(1, 32, 32, "f32", 32, 0), 3)
    for rows in (kv.k, kv.v):
        rows.write(mx.arange(96), mx.array(rng.standard_normal((96, 1, 32)).astype(np.float32)))
    one = np.array([0], np.int32)
    table = np.array([[1, 2]], np.int32)
    ends = np.array([0, 1], np.int32)
    batch = Batch(one, one + 40, ends, one + 41, (table,), one, one)
    q = mx.array(rng.standard_normal((1, 2, 32)).astype(np.float32))
    spec = AttentionSpec(scale=0.2, sinks=Sinks)
    got = np.array(AttentionKernels(maker())(q, kv, batch, spec))
    assert nmse(got, np.array(attention_ops(q, kv, batch, spec))) < 1e-10
