"""Every CUDA kernel against its definition, in the simulator: NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/cuda."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") in ("", "0"):
    pytest.skip("the simulator is off: set NUMBA_ENABLE_CUDASIM=1 before Python starts", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install 'edgellm[cuda]')")

from edgellm import LLM, SamplingParams
from edgellm.backends.base import AttentionSpec, KVSpec, QTensor, RopeSpec, RouteSpec
from edgellm.backends.cuda.arrays import Pool
from edgellm.backends.cuda.backend import CUDABackend
from edgellm.backends.cuda.half import find_cublas
from edgellm.backends.cuda.unpack import UNPACK
from edgellm.backends.reference import ReferenceBackend
from edgellm.quants import GGMLType
from tests.metal.blocks import dequantized, nmse, random_weights
from tests.support.goldens import Golden
from tests.support.models import make_batch

SEED = 11


@pytest.fixture(scope="module")
def gpu() -> CUDABackend:
    return CUDABackend()


def up(gpu: CUDABackend, x: np.ndarray):
    from numba import cuda

    array = gpu._pool.take(x.shape, x.dtype.name)
    array.data = cuda.to_device(np.ascontiguousarray(x).reshape(-1))
    return array


def down(array) -> np.ndarray:
    return array.data.copy_to_host()[: array.size].reshape(array.shape)


def exact_rows(rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Activations that rounding to 8 bits per 32 leaves as they are, so that only the product is under test."""
    q = rng.integers(-127, 128, (rows, k // 32, 32))
    q[..., 5] = 127
    return (q * rng.uniform(0.005, 0.02, (rows, k // 32, 1))).astype(np.float32).reshape(rows, k)


def tensor(kind: GGMLType, raw: np.ndarray, shape: tuple[int, ...], name: str = "w.weight") -> QTensor:
    return QTensor(name, kind, shape, raw.reshape(*shape[:-1], -1))


@pytest.mark.parametrize("kind", [*UNPACK, GGMLType.F16, GGMLType.BF16, GGMLType.F32], ids=lambda t: t.name)
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_linear(gpu: CUDABackend, kind: GGMLType, rows: int) -> None:
    rng = np.random.default_rng(SEED)
    k, n = 256, 5
    raw = rng.standard_normal((n, k)).astype(np.float32).view(np.uint8)
    raw = raw if kind is GGMLType.F32 else random_weights(kind, n, k, rng)
    weights = dequantized(raw, kind)
    x = exact_rows(rows, k, rng)
    bias = rng.standard_normal(n).astype(np.float32)
    y = down(
        gpu.linear(
            up(gpu, x),
            gpu.load(tensor(kind, raw, (n, k))),
            gpu.load(tensor(GGMLType.F32, bias.view(np.uint8), (n,), "w.bias")),
        )
    )
    gpu._quantised.clear()
    assert nmse(y - bias, x @ weights.T) < 1e-10


class NumpyProduct:
    """A library's half-precision product, by numpy."""

    name = "numpy"

    def multiply(self, w, x, y, first: int, rows: int, n: int, m: int, k: int) -> None:
        a, b = (t.copy_to_host().astype(np.float32) for t in (x, w))
        out = y.copy_to_host()[: m * n].reshape(m, n)
        out[:, first : first + rows] = a[: m * k].reshape(m, k) @ b[: rows * k].reshape(rows, k).T
        y[: m * n].copy_to_device(out.reshape(-1))


@pytest.mark.parametrize("kind", [GGMLType.Q4_K, GGMLType.BF16], ids=lambda t: t.name)
def test_prompts_through_half_precision_tiles(monkeypatch: pytest.MonkeyPatch, kind: GGMLType) -> None:
    """Two tiles, the second one short; one row of x far outside float16's range, one all zero."""
    from edgellm.backends.cuda import backend

    rng = np.random.default_rng(SEED)
    k, n, m = 256, 7, 65
    monkeypatch.setattr(backend, "HALF_TILE", 2 * k * 5)
    gpu = CUDABackend(half=NumpyProduct())
    raw = random_weights(kind, n, k, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    x[3] *= 1e6
    x[4] = 0
    y = down(gpu.linear(up(gpu, x), gpu.load(tensor(kind, raw, (n, k)))))
    expected = x.astype(np.float64) @ dequantized(raw, kind).T
    rows = [i for i in range(m) if i != 4]
    error = ((y - expected)[rows] ** 2).sum(1) / (expected[rows] ** 2).sum(1)
    assert error.max() < 1e-5 and (y[4] == 0).all()
    assert gpu.describe()["prompt_matmul"] == "numpy"


def test_no_rows_at_all(gpu: CUDABackend) -> None:
    """What the last layer of a prompt's chunk gets when no logits are wanted."""
    rng = np.random.default_rng(SEED)
    x, none = rng.standard_normal((2, 256)).astype(np.float32), np.array([], np.int32)
    norm = gpu.load(tensor(GGMLType.F32, np.ones(256, np.float32).view(np.uint8), (256,)))
    w = gpu.load(tensor(GGMLType.Q4_K, random_weights(GGMLType.Q4_K, 4, 256, rng), (4, 256)))
    experts = gpu.load(tensor(GGMLType.Q8_0, random_weights(GGMLType.Q8_0, 8, 256, rng).reshape(2, 4, -1), (2, 4, 256)))
    rows = gpu.rms_norm(gpu.take(up(gpu, x), none), norm, 1e-5)
    assert down(gpu.linear(rows, w)).shape == (0, 4)
    ids, weights = gpu.route(gpu.linear(rows, w), RouteSpec(2))
    assert down(gpu.combine(gpu.expert_linear(rows, experts, ids), weights)).shape == (0, 4)
    batch = make_batch([[1, 2]], [0], [np.array([[1]], np.int32)], output_rows=[])
    assert gpu.execute(lambda b: gpu.take(up(gpu, x), b.output_rows), batch).shape == (0, 256)
    gpu.forget()


def test_buffers_are_used_again() -> None:
    pool = Pool()
    first = pool.take((100,))
    data = first.data
    second = pool.take((100,))
    other = second.data
    assert other is not data
    del first
    third = pool.take((60,))
    assert third.data is data
    del second, third
    small = pool.take((49,))  # they are more than twice as long
    assert small.data.size == 49


def test_why_prompts_take_the_own_kernel(gpu: CUDABackend) -> None:
    assert gpu.describe()["prompt_matmul"] == "own int8 kernel (the simulator has no cuBLAS)"
    reason = find_cublas()
    assert isinstance(reason, str) and "nvidia-cublas" in reason


@pytest.mark.parametrize("kind", [GGMLType.F16, GGMLType.BF16, GGMLType.F32], ids=lambda t: t.name)
def test_rows_that_8_does_not_divide(gpu: CUDABackend, kind: GGMLType) -> None:
    rng = np.random.default_rng(SEED)
    raw = rng.standard_normal((3, 20)).astype(np.float32).view(np.uint8)
    raw = raw if kind is GGMLType.F32 else random_weights(kind, 3, 20, rng)
    x = rng.standard_normal((9, 20)).astype(np.float32)
    y = down(gpu.linear(up(gpu, x), gpu.load(tensor(kind, raw, (3, 20)))))
    assert nmse(y, x @ dequantized(raw, kind).T) < 1e-10


@pytest.mark.parametrize("kind", [GGMLType.Q4_K, GGMLType.Q8_0, GGMLType.F16], ids=lambda t: t.name)
def test_experts_and_embedding(gpu: CUDABackend, kind: GGMLType) -> None:
    rng = np.random.default_rng(SEED)
    k, n, experts = 256, 3, 3
    raw = np.stack([random_weights(kind, n, k, rng) for _ in range(experts)])
    weights = np.stack([dequantized(r, kind) for r in raw])
    ids = np.array([[2, 0], [1, 1]], np.int32)
    x = exact_rows(2, k, rng)
    y = down(gpu.expert_linear(up(gpu, x), gpu.load(tensor(kind, raw, (experts, n, k))), up(gpu, ids)))
    gpu._quantised.clear()
    assert nmse(y, np.einsum("tk,tjnk->tjn", x, weights[ids])) < 1e-10
    rows = down(gpu.embed(gpu.load(tensor(kind, raw[0], (n, k))), np.array([2, 0], np.int32)))
    gpu._crossing.forget()
    np.testing.assert_allclose(rows, weights[0][[2, 0]], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("adjacent", [True, False])
def test_rope_norms_and_activations(gpu: CUDABackend, adjacent: bool) -> None:
    rng = np.random.default_rng(SEED)
    reference = ReferenceBackend()
    x = rng.standard_normal((2, 3, 16)).astype(np.float32)
    batch = make_batch([[1, 2]], [40], [np.array([[1, 2]], np.int32)])
    spec = RopeSpec(8, adjacent, rng.random((1, 4)).astype(np.float32), np.array([1.1], np.float32))
    np.testing.assert_allclose(down(gpu.rope(up(gpu, x), batch, spec)), reference.rope(x, batch, spec), atol=2e-6)
    gpu._crossing.forget()
    weight = tensor(GGMLType.F32, rng.standard_normal(16).astype(np.float32).view(np.uint8), (16,))
    for norm in ("rms_norm", "layer_norm"):
        extra = (None,) if norm == "layer_norm" else ()
        got = getattr(gpu, norm)(up(gpu, x), gpu.load(weight), *extra, 1e-5)
        expected = getattr(reference, norm)(x, reference.load(weight), *extra, 1e-5)
        np.testing.assert_allclose(down(got), expected, atol=2e-6)
    other = rng.standard_normal(x.shape).astype(np.float32)
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "exp_rest", "swiglu_oai"):
        got = down(gpu.activate(kind, up(gpu, x), up(gpu, other)))
        np.testing.assert_allclose(got, reference.activate(kind, x, other), atol=2e-6, err_msg=kind)


def test_heads_with_their_own_matrices_and_columns(gpu: CUDABackend) -> None:
    rng, reference = np.random.default_rng(SEED), ReferenceBackend()
    x, values = exact_rows(6, 32, rng).reshape(2, 3, 32), rng.standard_normal((3, 5, 32)).astype(np.float32)
    weight = tensor(GGMLType.F32, values.view(np.uint8), (3, 5, 32))
    found, expected = gpu.head_linear(up(gpu, x), gpu.load(weight)), reference.head_linear(x, reference.load(weight))
    np.testing.assert_allclose(down(found), expected, rtol=1e-5, atol=1e-4)
    assert np.array_equal(down(gpu.columns(up(gpu, x), 3, 9)), x[..., 3:9])
    assert np.array_equal(down(gpu.concat(up(gpu, x), up(gpu, x[..., 3:9]))), np.concatenate([x, x[..., 3:9]], -1))


@pytest.mark.parametrize("scoring", ["softmax", "softmax_topk", "sigmoid"])
def test_route(gpu: CUDABackend, scoring: str) -> None:
    scores = np.random.default_rng(SEED).standard_normal((3, 6)).astype(np.float32)
    scores[1, 2] = scores[1, 4] = 5.0  # a tie: the lower index wins
    for groups in ((1, 1), (3, 1), (3, 2)):
        spec = RouteSpec(2, scoring, scoring != "sigmoid", 1.5, *groups)
        ids, weights = gpu.route(up(gpu, scores), spec)
        expected_ids, expected_weights = ReferenceBackend().route(scores, spec)
        np.testing.assert_array_equal(down(ids), expected_ids)
        np.testing.assert_allclose(down(weights), expected_weights, rtol=1e-5)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 5.0)])
def test_attention(gpu: CUDABackend, kv_type: str, window: int, softcap: float) -> None:
    rng = np.random.default_rng(SEED)
    reference = ReferenceBackend()
    spec = KVSpec(1, 32, 32, kv_type, 16, 0)
    tables = [np.array([[2, 1, 3]], np.int32)]
    attention = AttentionSpec(scale=0.2, window=window, softcap=softcap)
    pages, expected_pages = gpu.new_kv(spec, 4), reference.new_kv(spec, 4)
    for start, n in ((0, 5), (5, 1)):
        batch = make_batch([[0] * n], [start], tables)
        k, v = (rng.standard_normal((n, 1, 32)).astype(np.float32) for _ in range(2))
        q = rng.standard_normal((n, 2, 32)).astype(np.float32)
        gpu.store_kv(pages, up(gpu, k), up(gpu, v), batch)
        reference.store_kv(expected_pages, k, v, batch)
        got = down(gpu.attention(up(gpu, q), pages, batch, attention))
        gpu._crossing.forget()
        expected = reference.attention(q, expected_pages, batch, attention)
        assert nmse(got, expected) < (1e-5 if kv_type == "q8_0" else 1e-10)
    data = pages.read_block(2)
    pages.write_block(3, data)
    assert pages.read_block(3) == data
    pages.copy_block(2, 1)
    assert pages.read_block(1) == data


@pytest.mark.parametrize(
    ("k_dim", "v_dim", "heads", "kv_heads", "contexts", "causal"),
    [
        (32, 32, 2, 1, (70, 41), True),  # three partitions and two
        (256, 64, 8, 2, (5, 3), True),  # a group too large for one warp; K and V of different widths
        (20, 20, 2, 2, (12, 4), False),  # an odd width, and both ways
    ],
)
def test_attention_of_several_sequences(gpu: CUDABackend, k_dim, v_dim, heads, kv_heads, contexts, causal) -> None:
    rng = np.random.default_rng(SEED)
    reference = ReferenceBackend()
    shape = KVSpec(kv_heads, k_dim, v_dim, "f16", 16, 0)
    tables = [np.array([[4, 9, 2, 7, 5], [1, 8, 3, 0, 0]], np.int32)]
    pages, expected_pages = gpu.new_kv(shape, 10), reference.new_kv(shape, 10)
    sinks = tensor(GGMLType.F32, rng.standard_normal(heads).astype(np.float32).view(np.uint8), (heads,), "s.weight")
    for starts, counts in (((0, 0), contexts), (contexts, (1, 1))):
        batch = make_batch([[0] * n for n in counts], starts, tables)
        n = sum(counts)
        k, v = (rng.standard_normal((n, kv_heads, d)).astype(np.float32) for d in (k_dim, v_dim))
        gpu.store_kv(pages, up(gpu, k), up(gpu, v), batch)
        reference.store_kv(expected_pages, k, v, batch)
        gpu.forget()
    q = rng.standard_normal((n, heads, k_dim)).astype(np.float32)
    for window in (50,) if causal else (0, 6):
        spec = AttentionSpec(scale=0.2, window=window, causal=causal)
        specs = [replace(spec, sinks=b.load(sinks)) for b in (gpu, reference)]
        got = down(gpu.attention(up(gpu, q), pages, batch, specs[0]))
        gpu.forget()
        assert nmse(got, reference.attention(q, expected_pages, batch, specs[1])) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_goldens_end_to_end(name: str) -> None:
    """Some three minutes a model in the simulator: python -m pytest -m slow tests/cuda."""
    golden = Golden(name)
    with LLM(golden.path(), backend="cuda", kv_type="f32", ctx=64) as llm:
        assert np.abs(llm.logits(golden.ids(0)) - golden.logits(0)).max() < 2e-3
        (completion,) = llm.generate([golden.prompt], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        assert list(completion.ids) == golden.greedy[:2]
        assert llm.stats()["backend"]["name"] == "cuda"
