"""Routing, experts' products and their sum: against the reference; bit-equal to `linear` with the expert's matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgellm.backends.base import RouteSpec
from edgellm.backends.cpu import matmul_args
from edgellm.backends.cpu.backend import CPUBackend
from edgellm.backends.cpu.jit import jit_disabled
from edgellm.backends.cpu.simd import view
from edgellm.backends.reference import ReferenceBackend
from edgellm.loader import open_gguf
from edgellm.models.registry import load_model
from edgellm.quants import GGMLType, QTensor
from tests.cpu.support import Cache, constant, tensor
from tests.cpu.test_matmul import product, weight
from tests.support.models import Runner
from tests.support.tiny import tiny_gguf

pytestmark = [pytest.mark.kernel, pytest.mark.thorough]
SEED = 5


@pytest.fixture(scope="module")
def cpu():
    backend = CPUBackend(threads=2)
    yield backend
    backend.close()


def run(backend: Any, x: np.ndarray, op: Any) -> np.ndarray:
    """`op(backend, x as an activation)`."""
    batch = Cache(np.random.default_rng(SEED), 1, len(x)).batch({0: len(x)})
    table = constant(backend, x)
    batch = replace(batch, ids=np.arange(len(x), dtype=np.int32))
    return backend.execute(lambda b: op(backend, backend.embed(table, b.ids)), batch)


@pytest.mark.parametrize("scoring", ["softmax", "softmax_topk", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (6, 5)])
def test_route(cpu, scoring, biased, groups):
    rng = np.random.default_rng(SEED)
    scores = rng.standard_normal((5, 12)).astype(np.float32)
    scores[1] = 0.5  # all tie: the lowest indices win
    spec = RouteSpec(3, scoring, scoring != "softmax", 1.5, *groups)
    bias = tensor(rng.standard_normal(12).astype(np.float32)) if biased else None
    each = np.arange(12, dtype=np.float32) + 1

    def op(backend, s):
        ids, weights = backend.route(s, spec, None if bias is None else backend.load(bias))
        # One number per expert, so that the choice shows in the result.
        values = backend.expert_linear(s, backend.load(tensor(np.repeat(each, 12).reshape(12, 1, 12))), ids)
        return backend.combine(values, weights)

    np.testing.assert_allclose(run(cpu, scores, op), run(ReferenceBackend(), scores, op), rtol=2e-5, atol=2e-5)


def stacked(rng: np.random.Generator, kind: str, n_experts: int, m: int, k: int) -> QTensor:
    parts = [weight(rng, kind, m, k) for _ in range(n_experts)]
    return QTensor("test.experts", GGMLType[kind], (n_experts, m, k), np.stack([p.data for p in parts]))


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("n", [1, 3, 40])
def test_each_pair_is_that_experts_linear(cpu, kind, n):
    if jit_disabled() and n > 3:
        pytest.skip("plain Python is slow")
    rng = np.random.default_rng(SEED)
    k, m, n_experts, used = 256, 20, 6, 2
    w, bias = stacked(rng, kind, n_experts, m, k), rng.standard_normal((n_experts, m)).astype(np.float32)
    x = rng.standard_normal((n, k)).astype(np.float32)
    scores = rng.standard_normal((n_experts, k)).astype(np.float32)
    ids = np.argsort(-(x @ scores.T), axis=1, kind="stable")[:, :used]

    def op(backend, a):
        chosen, _ = backend.route(backend.linear(a, backend.load(tensor(scores))), RouteSpec(used))
        return backend.expert_linear(a, backend.load(w), chosen, backend.load(tensor(bias)))

    out = run(cpu, x, op)
    for e in range(n_experts):
        single = product(cpu, x, QTensor("one", w.type, (m, k), w.data[e]), tensor(bias[e]))
        rows, slots = np.nonzero(ids == e)
        assert (out[rows, slots] == single[rows]).all()


@pytest.mark.parametrize("n", [1, 3, 40])
def test_each_head_takes_its_own_matrix(cpu, n):
    if jit_disabled() and n > 3:
        pytest.skip("plain Python is slow")
    rng = np.random.default_rng(SEED)
    w, x = stacked(rng, "Q8_0", 4, 20, 64), rng.standard_normal((n, 256)).astype(np.float32)
    out = run(cpu, x, lambda b, a: b.head_linear(a.reshape(a.shape[0], 4, 64), b.load(w)).reshape(a.shape[0], 80))
    for head in range(4):
        single = product(cpu, x[:, 64 * head :][:, :64].copy(), QTensor("one", w.type, (20, 64), w.data[head]), None)
        assert (out[:, 20 * head :][:, :20] == single).all()


@pytest.mark.parametrize("n", [1, 40])
def test_experts_of_experts(cpu, n):
    """x (n, n_used, k): each slot has its own row (the down projection)."""
    if jit_disabled() and n > 1:
        pytest.skip("plain Python is slow")
    rng = np.random.default_rng(SEED)
    up, down = stacked(rng, "Q5_0", 4, 64, 32), stacked(rng, "Q4_0", 4, 17, 64)
    x, scores = rng.standard_normal((n, 32)).astype(np.float32), rng.standard_normal((4, 32)).astype(np.float32)

    def op(backend, a):
        chosen, weights = backend.route(backend.linear(a, backend.load(tensor(scores))), RouteSpec(2))
        hidden = backend.expert_linear(a, backend.load(up), chosen)
        return backend.combine(backend.expert_linear(hidden, backend.load(down), chosen), weights)

    expected = run(ReferenceBackend(), x, op)
    assert np.abs(run(cpu, x, op) - expected).max() < 0.02 * np.abs(expected).max()


def weight_bytes(tape: Any) -> int:
    """Bytes of weights that the products of a one-token tape read, by their arguments: whole matrices, and of experts
    one matrix for each pair on the tape."""
    total = 0
    for called, address, units in tape.calls():
        a = [int(v) for v in view(address, np.int64, 24 if called.name.startswith("experts") else 7)]
        if called.name.startswith("linear"):
            total += a[matmul_args.ROW_BYTES // 8] * a[matmul_args.N_ROWS // 8]
        elif called.name.startswith("matmul"):
            total += a[5] * a[6] * (4 if called.name.endswith("f32") else 2)
        elif called.name.startswith("experts"):
            matrix, each = a[8:10] if called.name.endswith("16_pairs") else a[matmul_args.COUNT + 1 :][:2]
            total += units // each * matrix
    return total


@pytest.mark.skipif(jit_disabled(), reason="counts the tape of compiled kernels")
@pytest.mark.parametrize("quant", ["F16", "Q8_0"])
def test_a_decode_step_reads_the_chosen_experts_and_what_all_share(cpu, tmp_path, quant):
    path = tiny_gguf(tmp_path / "moe.gguf", "qwen2moe", n_experts=8, n_experts_used=2, quant=quant)
    with open_gguf(path) as gguf:
        run = Runner(load_model(gguf, cpu), cpu)
        run.run([5, 6, 7])
        run.run([8])
        tape = list(cpu._tapes.values())[-1]
        matrices = {name: t for name, t in gguf.tensors.items() if len(t.shape) > 1}
        experts = sum(t.nbytes for name, t in matrices.items() if "_exps." in name)
        shared = sum(t.nbytes for name, t in matrices.items() if "_exps." not in name)
        assert experts > shared / 4  # or the count below would show little
        # The embedding is the output head too, read once.
        assert weight_bytes(tape) == experts * 2 // 8 + shared
