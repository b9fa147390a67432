"""Whole models on the Metal backend: plain ops on MLX's CPU device, and the Metal text through the shim."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")

from edgellm.backends.metal.backend import MetalBackend  # noqa: E402
from edgellm.loader import open_gguf  # noqa: E402
from edgellm.models.registry import load_model  # noqa: E402
from tests.metal.harness import CpuKernel, maker  # noqa: E402
from tests.support.goldens import Golden  # noqa: E402
from tests.support.models import Runner  # noqa: E402

NAMES = "llama mistral qwen2 qwen3 qwen3_yarn gemma2 gemma3 phi3 qwen3moe smollm3"


def runner(golden: Golden, backend: MetalBackend, kind: str = "f16", kv_type: str = "f32") -> Runner:
    return Runner(load_model(open_gguf(golden.path(kind)), backend), backend, kv_type)


@pytest.mark.parametrize("name", NAMES.split())
def test_plain_ops_reach_the_golden(name: str) -> None:
    golden = Golden(name)
    run = runner(golden, MetalBackend())
    for i in range(3):
        assert np.abs(run.logits(golden.ids(i)) - golden.logits(i)).max() < 2e-3
    assert run.greedy(golden.prompt, 32) == golden.greedy


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q2_K", "Q3_K_M", "Q5_K_M", "Q6_K", "IQ4_XS", "Q8_0", "Q5_0"])
def test_quantised_files_reach_their_dequantised_golden(kind: str) -> None:
    golden = Golden("llama")
    run = runner(golden, MetalBackend(), kind)
    assert np.abs(run.logits(golden.ids(1)) - golden.dequant_logits(kind, 1)).max() < 2e-3


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: the Metal text cannot be run here")
@pytest.mark.parametrize(("name", "kind"), [("llama", "Q4_K_M"), ("gemma3", "f16"), ("qwen3moe", "f16")])
def test_a_model_runs_through_the_metal_text(name: str, kind: str) -> None:
    golden = Golden(name)
    made: list[CpuKernel] = []
    run = runner(golden, MetalBackend(maker(made)), kind)
    plain = runner(golden, MetalBackend(), kind)
    ids = golden.ids(1)
    for chunk in (ids[:10], ids[10:13], ids[13:14]):  # dequantise + matmul, few rows, one row
        np.testing.assert_allclose(run.run(chunk), plain.run(chunk), atol=2e-2, rtol=0)
    assert {k.name.rsplit("_", 2)[0] for k in made if k.code} >= {"attention"}
    assert not [f for kernel in made for f in kernel.findings]


def test_cache_writes_copy_nothing() -> None:
    """200 decode steps with a 64 MB cache: peak memory stays flat, so rows are written in place."""
    golden = Golden("llama")
    run = Runner(load_model(open_gguf(golden.path()), backend := MetalBackend()), backend, "f32", n_ctx=32768)
    run.run(golden.ids(1))
    for _ in range(5):
        run.run([1])
    mx.reset_peak_memory()
    before = mx.get_peak_memory() or mx.get_active_memory()
    peaks = []
    for _ in range(200):
        run.run([1])
        peaks.append(mx.get_peak_memory())
    cache = sum(kv.nbytes for kv in run.kv)
    assert peaks[-1] - max(before, peaks[0]) < cache / 8
