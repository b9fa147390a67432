"""Whole models on the Metal backend: plain ops on MLX's CPU device, and the Metal text through the shim."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")

from edgellm import LLM  # noqa: E402
from edgellm.backends.metal.backend import MetalBackend  # noqa: E402
from edgellm.loader import open_gguf  # noqa: E402
from edgellm.models.registry import load_model  # noqa: E402
from tests.metal.can_run import cannot_run  # noqa: E402
from tests.metal.closeness import TOLERANCE  # noqa: E402
from tests.metal.harness import CpuKernel, maker  # noqa: E402
from tests.support.goldens import DATA, DECODERS, ENCODERS, Golden, shared_goldens  # noqa: E402
from tests.support.models import Runner  # noqa: E402

SHARED = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_yarn",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3_swa",
    "qwen3moe",
    "smollm3",
]


def runner(golden: Golden, backend: MetalBackend, kind: str = "f16", kv_type: str = "f32") -> Runner:
    return Runner(load_model(open_gguf(golden.path(kind)), backend), backend, kv_type)


def check_golden(golden: Golden) -> None:
    run = runner(golden, MetalBackend())
    for i in range(3):
        assert np.abs(run.logits(golden.ids(i)) - golden.logits(i)).max() < TOLERANCE
    if not mx.metal.is_available():  # rounding to half may turn a near tie
        assert run.greedy(golden.prompt, len(golden.greedy)) == golden.greedy


@pytest.mark.parametrize("name", SHARED)
def test_plain_ops_reach_the_shared_goldens(name: str) -> None:
    check_golden(Golden(name))


@pytest.mark.parametrize("name", DECODERS)
def test_plain_ops_reach_every_architecture_s_golden(name: str) -> None:
    check_golden(Golden(name, DATA / "goldens"))


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_on_plain_ops(name: str) -> None:
    golden = Golden(name, DATA / "goldens")
    expected = [golden.z[f"hidden_{i}"].mean(axis=0) for i in range(3)]
    with LLM(golden.path(), backend="metal", kv_type="f32") as llm:
        found = llm.embed([golden.ids(i) for i in range(3)])
    for vector, mean in zip(found, expected, strict=True):
        assert np.abs(vector - mean / np.linalg.norm(mean)).max() < 1e-4


@pytest.mark.parametrize(("variant", "table"), [("all_short", 0), ("all_long", 1)])
def test_longrope_tables(variant: str, table: int) -> None:
    golden = Golden("phi3")
    run = runner(golden, MetalBackend())
    for i in (1, 2):
        found = run.logits(golden.ids(i), variant=table)
        assert np.abs(found - golden.logits(i, variant)).max() < TOLERANCE


@pytest.mark.parametrize("kind", Golden("llama").quant_types() if shared_goldens() else [])
def test_quantised_files_reach_their_dequantised_golden(kind: str) -> None:
    golden = Golden("llama")
    run = runner(golden, MetalBackend(), kind)
    for i in range(3):
        expected = golden.dequant_logits(kind, i)
        assert np.abs(run.logits(golden.ids(i))[-len(expected) :] - expected).max() < TOLERANCE


@pytest.mark.skipif(bool(cannot_run()), reason=cannot_run())
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
