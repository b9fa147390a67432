"""Types without a kernel on the CPU backend: kept as Q8_0, in every product, and counted in the memory budget."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from edgellm.backends.base import RouteSpec
from edgellm.backends.cpu.backend import CPUBackend
from edgellm.backends.cpu.converted import as_q8_0
from edgellm.backends.dequant import dequantise
from edgellm.errors import UnsupportedModel
from edgellm.loader import open_gguf
from edgellm.opening import ModelFile, _kept_bytes
from edgellm.quants import QUANT_TABLE, GGMLType, QTensor
from tests.cpu.support import tensor
from tests.cpu.test_experts import run
from tests.support.gguf_bytes import GGUFBytes

KINDS = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4", "Q1_0", "Q2_0"]
ROWS, WIDTH, EXPERTS = 40, 256, 3


def stored(kind: str, *shape: int) -> QTensor:
    """Random blocks. Bytes below 48 are harmless as scales of every type (no infinities)."""
    info = QUANT_TABLE[GGMLType[kind]]
    n_bytes = shape[-1] // info.block_size * info.type_size
    data = np.random.default_rng(0).integers(0, 48, (*shape[:-1], n_bytes), np.uint8)
    return QTensor("blk.0.test.weight", GGMLType[kind], shape, data)


@pytest.fixture(scope="module")
def cpu():
    backend = CPUBackend(threads=1)
    yield backend
    backend.close()


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_within_half_a_step(kind: str) -> None:
    weight = stored(kind, ROWS, WIDTH)
    made = as_q8_0(weight)
    assert made.shape == weight.shape and made.type == GGMLType.Q8_0
    values = np.asarray(dequantise(weight.data, weight.type), np.float32).reshape(-1, 32)
    found = np.asarray(dequantise(made.data, made.type), np.float32).reshape(-1, 32)
    step = np.abs(values).max(axis=1, keepdims=True) / 127
    assert (np.abs(found - values) <= 0.51 * step + 4e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dequantised_weights(cpu: CPUBackend, kind: str) -> None:
    weight, experts = stored(kind, ROWS, WIDTH), stored(kind, EXPERTS, ROWS, WIDTH)
    x = np.random.default_rng(1).standard_normal((3, WIDTH)).astype(np.float32)
    matrix = np.asarray(dequantise(weight.data, weight.type), np.float32).reshape(ROWS, WIDTH)
    # Rows of x are rounded to steps of a 127th of their largest number, weights likewise.
    bound = np.abs(x).max() / 100
    loaded, loaded_experts = cpu.load(weight), cpu.load(experts)
    found = run(cpu, x, lambda b, a: b.linear(a, loaded))
    assert (np.abs(found - x @ matrix.T) <= bound * np.abs(matrix).sum(axis=1)).all()

    router = cpu.load(tensor(np.zeros((EXPERTS, WIDTH))))

    def through_experts(b, a):
        scores = b.linear(a, router)
        ids, weights = b.route(scores, RouteSpec(1))  # all scores tie: the first
        return b.combine(b.expert_linear(a, loaded_experts, ids), weights)

    first = np.asarray(dequantise(experts.data[0], experts.type), np.float32).reshape(ROWS, WIDTH)
    assert (np.abs(run(cpu, x, through_experts) - x @ first.T) <= bound * np.abs(first).sum(axis=1)).all()


def test_memory_is_counted_and_one_line_tells_of_it(cpu: CPUBackend, caplog: pytest.LogCaptureFixture) -> None:
    weight = stored("IQ2_XXS", ROWS, WIDTH)
    assert cpu.weight_bytes(weight) == ROWS * WIDTH // 32 * 34
    embedding = QTensor("token_embd.weight", weight.type, weight.shape, weight.data)
    assert cpu.weight_bytes(embedding) == ROWS * WIDTH // 32 * 34 + weight.data.nbytes
    assert cpu.weight_bytes(stored("Q4_K", ROWS, WIDTH)) == ROWS * 144
    own = CPUBackend(threads=1)
    with caplog.at_level(logging.WARNING, "edgellm"):
        own.load(weight)
        own.load(weight)
        own.load(embedding)
    assert [r.getMessage() for r in caplog.records if "IQ2_XXS" in r.getMessage()] == [
        "the CPU backend has no kernel for IQ2_XXS: such weights are kept in memory as Q8_0"
    ]
    own.close()


def test_the_plan_counts_what_is_kept(tmp_path) -> None:
    path = GGUFBytes().text("general.architecture", "llama")
    for name in ("token_embd.weight", "output.weight"):
        path.tensor(name, GGMLType.IQ2_XXS, [WIDTH, ROWS], stored("IQ2_XXS", ROWS, WIDTH).data.tobytes())
    backend = CPUBackend(threads=1)
    with open_gguf(path.write(tmp_path / "m.gguf")) as gguf:
        file = ModelFile("m", tmp_path / "m.gguf", gguf, None, None)  # type: ignore[arg-type]
        assert _kept_bytes(file, backend) == 2 * ROWS * WIDTH // 32 * 34 + ROWS * 66
        assert _kept_bytes(file, None) == gguf.nbytes == 2 * ROWS * 66
    backend.close()


def test_a_type_that_no_product_takes_is_named(cpu: CPUBackend) -> None:
    wide = QTensor("blk.0.x.weight", GGMLType.F64, (2, 8), np.zeros((2, 64), np.uint8))
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.x\.weight is of type F64, which the CPU backend"):
        run(cpu, np.zeros((1, 8), np.float32), lambda b, a: b.linear(a, b.load(wide)))
