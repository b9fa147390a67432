"""Every architecture against transformers' float32 logits, on each backend that runs here (exact path: f32 cache)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm import LLM, SamplingParams
from edgellm.backends import create
from edgellm.backends.base import Backend
from edgellm.errors import BackendUnavailable
from edgellm.loader import open_gguf
from edgellm.models.registry import load_model
from tests.support.goldens import DATA, DECODERS, Golden
from tests.support.models import Runner

TOLERANCE = 5e-4
SHARED = ["llama", "mistral", "gemma2", "gemma3", "qwen2", "qwen3", "qwen3_yarn", "phi3", "phi3_swa", "smollm3"]
SHARED += ["qwen3moe"]
QUANT_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K"]
QUANT_TYPES += ["IQ4_NL", "IQ4_XS"]


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    try:
        made = create(request.param)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    yield made
    made.close()


def runner(path: Path, backend: Backend, kv_type: str = "f32") -> Runner:
    return Runner(load_model(open_gguf(path), backend), backend, kv_type)


def check_golden(golden: Golden, backend: Backend) -> None:
    run = runner(golden.path(), backend)
    for i in range(3):
        assert np.abs(run.logits(golden.ids(i)) - golden.logits(i)).max() < TOLERANCE
    assert run.greedy(golden.prompt, len(golden.greedy)) == golden.greedy


@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_greedy_ids_equal_transformers(name: str, backend: Backend) -> None:
    check_golden(Golden(name, DATA / "goldens"), backend)


@pytest.mark.thorough
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_ids_through_the_engine(name: str) -> None:
    """Block tables, windows and rotary variants as the engine makes them, beside a neighbour."""
    golden = Golden(name, DATA / "goldens")
    params = SamplingParams(temperature=0, max_tokens=len(golden.greedy), ignore_eos=True)
    with LLM(golden.path(), backend="cpu", kv_type="f32") as llm:
        answer, _ = llm.generate([golden.prompt, golden.ids(1)], params)
    assert answer.ids == golden.greedy


@pytest.mark.parametrize("name", SHARED)
def test_shared_goldens(name: str, backend: Backend) -> None:
    check_golden(Golden(name), backend)


@pytest.mark.parametrize("variant,table", [("all_short", 0), ("all_long", 1)])
def test_longrope_table_is_the_request_s_choice(variant: str, table: int, backend: Backend) -> None:
    golden = Golden("phi3")
    run = runner(golden.path(), backend)
    for i in (1, 2):
        found = run.logits(golden.ids(i), variant=table)
        assert np.abs(found - golden.logits(i, variant)).max() < TOLERANCE


def test_longrope_is_chosen_by_prompt_and_answer_together() -> None:
    config = load_model(open_gguf(Golden("phi3", DATA / "goldens").path()), create("reference")).config
    assert [config.rope_variant(n) for n in (1, 36, 37, 256)] == [0, 0, 1, 1]
    plain = load_model(open_gguf(Golden("llama", DATA / "goldens").path()), create("reference")).config
    assert plain.rope_variant(1000) == 0


@pytest.mark.parametrize("kind", QUANT_TYPES)
def test_quantised_weights_equal_their_dequantised_values(kind: str) -> None:
    """The reference computes with dequantised weights; other backends round activations and have their own bound."""
    golden = Golden("llama")
    run = runner(golden.path(kind), create("reference"))
    for i in range(3):
        expected = golden.dequant_logits(kind, i)
        found = run.logits(golden.ids(i))[-len(expected) :]
        assert np.abs(found - expected).max() < TOLERANCE
