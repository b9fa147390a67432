"""Each op of the CPU backend against the reference backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgellm.backends.base import RopeSpec
from edgellm.backends.cpu.backend import CPUBackend
from edgellm.backends.cpu.rope import FEW_ROWS, RunsOfAngles, angles
from edgellm.backends.reference import ReferenceBackend
from edgellm.quants import GGMLType
from tests.cpu.support import Cache, constant, tensor

pytestmark = pytest.mark.kernel
SEED = 3


@pytest.fixture(scope="module")
def cpu():
    backend = CPUBackend(threads=2)
    yield backend
    backend.close()


def agree(cpu, op, *inputs, rtol=2e-6, atol=2e-6, **weights):
    """`op(backend, batch, *arrays, **weights)` on both backends; inputs (n, ...) arrays, weights QTensors."""
    n = len(inputs[0])
    batch = Cache(np.random.default_rng(SEED), 1, n).batch({0: n})
    batch = replace(batch, ids=np.arange(n, dtype=np.int32))
    results = []
    for backend in (cpu, ReferenceBackend()):
        tables = [constant(backend, x) for x in inputs]
        loaded = {k: None if w is None else backend.load(w) for k, w in weights.items()}

        def forward(b, backend=backend, tables=tables, loaded=loaded):
            arrays = [backend.embed(t, b.ids) for t in tables]
            arrays = [a.reshape(a.shape[0], *x.shape[1:]) for a, x in zip(arrays, inputs, strict=True)]
            return op(backend, b, *arrays, **loaded)

        results.append(backend.execute(forward, batch))
    np.testing.assert_allclose(results[0], results[1], rtol=rtol, atol=atol)


def normal(*shape):
    return np.random.default_rng(SEED).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.F16, GGMLType.BF16])
@pytest.mark.parametrize(("n", "k", "m"), [(1, 64, 33), (7, 45, 18)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(cpu, kind, n, k, m, bias):
    agree(
        cpu,
        lambda b, _, x, w, bias: b.linear(x, w, bias),
        normal(n, k),
        w=tensor(normal(m, k), kind),
        bias=tensor(normal(m)) if bias else None,
        atol=2e-5,
    )


@pytest.mark.parametrize(
    ("shape", "weight"), [((3, 40), (40,)), ((2, 3, 13), (13,)), ((2, 3, 16), (3, 16)), ((2, 24), None)]
)
def test_norms(cpu, shape, weight):
    w = None if weight is None else tensor(normal(*weight))
    agree(cpu, lambda b, _, x, w: b.rms_norm(x, w, 1e-5), normal(*shape), w=w)
    agree(cpu, lambda b, _, x, w, c: b.layer_norm(x, w, c, 1e-5), normal(*shape), w=w, c=w)


@pytest.mark.parametrize(
    "kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "exp_rest", "swiglu_oai"]
)
def test_activate(cpu, kind):
    x = np.concatenate([normal(1, 2051) * 4, np.linspace(-100, 100, 2051, dtype=np.float32)[None]])
    agree(cpu, lambda b, _, x, y: b.activate(kind, x, y), x, normal(2, 2051), rtol=3e-6)
    if kind != "swiglu_oai":
        agree(cpu, lambda b, _, x: b.activate(kind, x), x, rtol=3e-6)


def test_gelu_left_tail(cpu):
    """The tail keeps its relative accuracy (math.erfc in double as the measure)."""
    import math

    x = np.linspace(-5, 0, 512, dtype=np.float32)[None]
    batch = replace(Cache(np.random.default_rng(0), 1, 1).batch({0: 1}), ids=np.zeros(1, np.int32))
    table = constant(cpu, x)
    y = cpu.execute(lambda b: cpu.activate("gelu", cpu.embed(table, b.ids)), batch)
    exact = np.array([v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x[0].astype(float)])
    np.testing.assert_allclose(y[0], exact, rtol=2e-6, atol=1e-12)


def test_add_scale_take(cpu):
    a, b = normal(3, 1029), normal(3, 1029) * 2
    agree(cpu, lambda k, _, x, y: k.add(x, y), a, b)
    agree(cpu, lambda k, _, x, y: k.add(x, y, 0.25), a, b)
    agree(cpu, lambda k, _, x: k.scale(x, 3.5), a)
    agree(cpu, lambda k, _, x: k.scale(x, 3.5, 2.0), a)
    agree(cpu, lambda k, batch, x: k.take(k.add(x, x), batch.output_rows), a)


@pytest.mark.parametrize("n", [1, 3, 40])
def test_columns_of_heads(cpu, n):
    """Twice in one pass, over a product: the heads' ids and their order are made once."""

    def op(b, _, x, w, back):
        up = b.head_linear(b.columns(x, 3, 20), w)
        return b.concat(b.concat(b.head_linear(up, back), b.columns(up, 0, 9)), x)

    weights = {"w": tensor(normal(3, 24, 17)), "back": tensor(normal(3, 5, 24))}
    agree(cpu, op, normal(n, 3, 21), **weights, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize(("dim", "n_dims"), [(64, 64), (24, 24), (80, 20)])
def test_rope(cpu, adjacent, dim, n_dims):
    inverse = (10000.0 ** (-np.arange(n_dims // 2) / (n_dims // 2))).astype(np.float32)
    spec = RopeSpec(n_dims, adjacent, np.stack([inverse, inverse / 2]), np.array([1.0, 1.1], np.float32))
    agree(cpu, lambda b, batch, x: b.rope(x, batch, spec), normal(5, 3, dim))


@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS])
def test_angles_of_few_rows_are_those_of_many(rows):
    """From runs of positions or row by row: the same bits, also where runs had to be thrown away."""
    rng = np.random.default_rng(SEED)
    spec = RopeSpec(96, False, rng.random((2, 48)).astype(np.float32), np.array([1.0, 1.1], np.float32))
    runs = RunsOfAngles(spec)
    for _ in range(40):
        positions = rng.integers(0, 200_000, rows, dtype=np.int32)
        variants = rng.integers(0, 2, rows, dtype=np.int32)
        batch = replace(Cache(rng, 1, 2).batch({0: 2}), positions=positions, rope_variants=variants)
        cos, sin = (np.zeros((rows + 1, 48), np.float32) for _ in range(2))
        runs.fill(batch, cos, sin)
        wanted = angles(spec, positions, variants)
        assert (cos[:rows] == wanted[0]).all() and (sin[:rows] == wanted[1]).all()


@pytest.mark.parametrize("n", [3, 16, 8191, 8192, 8195, 20_000])
def test_largest_of_logits(cpu, n):
    """The first position of the largest value, as numpy has it; none in a row with a NaN or +inf."""
    rows = normal(7, n)
    rows[1] = rows[1, 0]
    rows[2, [0, n - 1]] = 9.0
    rows[3, n - 1] = 9.0
    rows[4] = -np.inf
    rows[5, n // 2] = np.inf
    rows[6, n - 1] = np.nan
    table = constant(cpu, rows)
    ids = np.array([6, 0, 1, 2, 3, 4, 5], np.int32)
    batch = replace(
        Cache(np.random.default_rng(0), 1, 7).batch({0: 7}), ids=ids, output_rows=np.arange(7, dtype=np.int32)
    )
    logits, largest = cpu.execute_logits(lambda b: cpu.embed(table, b.ids), batch)
    np.testing.assert_array_equal(logits, rows[ids])
    assert largest[1:6] == [(row.max(), row.argmax()) for row in rows[:5]]
    assert all(np.isnan(value) and position == 0 for value, position in (largest[0], largest[6]))


def test_embed_of_quantised_rows(cpu):
    """Rows of a Q8_0 table, as the gguf package dequantises them."""
    from gguf import GGMLQuantizationType, quants

    rows = normal(6, 64)
    data = quants.quantize(rows, GGMLQuantizationType.Q8_0)
    from edgellm.quants import QTensor

    table = cpu.load(QTensor("t", GGMLType.Q8_0, (6, 64), data))
    batch = replace(Cache(np.random.default_rng(0), 1, 2).batch({0: 2}), ids=np.array([4, 1], np.int32))
    out = cpu.execute(lambda b: cpu.embed(table, b.ids), batch)
    assert (out == quants.dequantize(data, GGMLQuantizationType.Q8_0)[[4, 1]]).all()
