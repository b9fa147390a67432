"""Quantised products: against their definition in numpy, equal bits however many rows go through, and the goldens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgellm.backends.cpu.backend import CPUBackend
from edgellm.backends.cpu.jit import jit_disabled
from edgellm.backends.cpu.matmul import QUANTISED
from edgellm.backends.dequant import dequantise
from edgellm.loader import open_gguf
from edgellm.models.registry import load_model
from edgellm.quants import QUANT_TABLE, GGMLType, QTensor
from tests.cpu.support import Cache, constant, tensor
from tests.support.goldens import Golden
from tests.support.models import Runner

pytestmark = pytest.mark.thorough

SEED = 11
KINDS = sorted(QUANTISED)
FEW_REGIMES = ("Q4_0", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")


@pytest.fixture(scope="module")
def cpu():
    backend = CPUBackend(threads=2)
    yield backend
    backend.close()


def weight(rng: np.random.Generator, kind: str, m: int, k: int) -> QTensor:
    """Random blocks of one type; the float fields of each block get values near 0.01."""
    info = QUANT_TABLE[GGMLType[kind]]
    blocks = rng.integers(0, 256, (m, k // info.block_size, info.type_size), dtype=np.uint8)
    floats = {"Q2_K": (80, 2), "Q3_K": (108, 1), "Q6_K": (208, 1), "Q4_K": (0, 2), "Q5_K": (0, 2)}
    start, count = floats.get(kind, (0, 2 if kind in ("Q4_1", "Q5_1") else 1))
    if kind == "MXFP4":
        blocks[:, :, 0] = rng.integers(116, 126, blocks.shape[:2])
    else:
        values = rng.uniform(-0.02, 0.02, (*blocks.shape[:2], count)).astype(np.float16)
        blocks[:, :, start : start + 2 * count] = values.view(np.uint8)
    return QTensor("test.weight", GGMLType[kind], (m, k), blocks.reshape(m, -1))


def product(cpu: CPUBackend, x: np.ndarray, w: QTensor, bias: QTensor | None = None) -> np.ndarray:
    batch = Cache(np.random.default_rng(SEED), 1, len(x)).batch({0: len(x)})
    batch = replace(batch, ids=np.arange(len(x), dtype=np.int32))
    table, loaded = constant(cpu, x), cpu.load(w)
    added = None if bias is None else cpu.load(bias)
    return cpu.execute(lambda b: cpu.linear(cpu.embed(table, b.ids), loaded, added), batch)


def by_definition(x: np.ndarray, w: QTensor) -> np.ndarray:
    """float64 product of the dequantised weights with activations rounded to int8 blocks."""
    block = QUANT_TABLE[w.type].block_size
    parts = x.reshape(len(x), -1, block)
    d = np.abs(parts).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), d, where=d > 0, out=np.zeros_like(d))
    rounded = np.rint(parts * inverse).astype(np.float64) * d
    return rounded.reshape(x.shape) @ dequantise(w.data, w.type).reshape(w.shape).astype(np.float64).T


@pytest.mark.kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "blocks"), [(37, 3), (5, 1), (19, 11)])
def test_definition_and_equal_bits_in_every_regime(cpu, kind, m, blocks):
    if jit_disabled() and (m, blocks) != (5, 1) and kind not in ("Q4_K", "Q4_1"):
        pytest.skip("plain Python is slow; one small shape each will do")
    rng = np.random.default_rng(SEED)
    k = blocks * QUANT_TABLE[GGMLType[kind]].block_size
    w = weight(rng, kind, m, k)
    x = rng.standard_normal((11, k)).astype(np.float32)
    x[3] = 0.0
    many = product(cpu, x, w)
    expected = by_definition(x, w)
    assert np.abs(many - expected).max() <= 2e-3 * np.abs(expected).max()
    assert (many[3] == 0).all()
    # K types have a kernel each for 2, 4 and 8 rows or more; types with blocks of 32 one for 2 to 8 and one for more,
    # which with AMX takes 16 at once; those of most blocks of 32 differ only in how codes are unpacked.
    for rows in (1, 7) if kind in FEW_REGIMES else (1, 2, 3, 4, 7):
        assert (product(cpu, x[:rows], w) == many[:rows]).all()


@pytest.mark.skipif(jit_disabled(), reason="plain Python is slow")
@pytest.mark.parametrize("kind", ["Q4_K", "Q4_1"])
def test_more_tokens_than_a_kernel_takes_at_once(cpu, kind):
    rng = np.random.default_rng(SEED)
    w = weight(rng, kind, 19, 256)
    x = rng.standard_normal((261, 256)).astype(np.float32)
    many = product(cpu, x, w)
    for start in range(0, 261, 7):
        assert (product(cpu, x[start : start + 7], w) == many[start : start + 7]).all()


@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_bias_and_two_users_of_one_input(cpu, kind):
    rng = np.random.default_rng(SEED)
    w, bias = weight(rng, kind, 19, 256), rng.standard_normal(19).astype(np.float32)
    x = rng.standard_normal((3, 256)).astype(np.float32)
    for rows in (1, 3):
        plain = product(cpu, x[:rows], w)
        assert (product(cpu, x[:rows], w, tensor(bias)) == plain + bias).all()


@pytest.mark.skipif(jit_disabled(), reason="whole models are slow in plain Python")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_as_near_to_the_dequantised_model_as_llama_cpp(cpu, name):
    golden = Golden(name)
    stored = np.load(golden.folder / "quant_golden.npz")
    for kind in golden.quant_types():
        run = Runner(load_model(open_gguf(golden.path(kind)), cpu), cpu)
        ours, theirs = [], []
        for i in range(3):
            exact = stored[f"{kind}.dequant_{i}"]
            ours.append((run.logits(golden.ids(i))[-len(exact) :] - exact).ravel())
            theirs.append((stored[f"{kind}.llamacpp_{i}"] - exact).ravel())
        a, b = np.concatenate(ours), np.concatenate(theirs)
        assert np.sqrt((a**2).mean()) <= 1.10 * np.sqrt((b**2).mean()), kind
        assert np.abs(a).max() <= 1.5 * np.abs(b).max(), kind
