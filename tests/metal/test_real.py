"""Real models on the Metal backend's plain ops: logits of the reference backend, exact path (f32 cache); the engine's
batches, prefix hits, chunks and drafts; and the one line that says what runs.

Minutes on plain ops, so .ci/run does SmolLM2's logits only; all of it: `pytest -m real tests/metal/test_real.py`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")

from edgellm import LLM, SamplingParams
from edgellm.engine.output import Completion
from tests.metal.closeness import TOLERANCE, assert_close
from tests.support.real import agreement, real_cases, real_model

pytestmark = pytest.mark.real

CASES = {"smollm2.gguf": "smollm2-135m-q4_1.json", "gemma3-270m.gguf": "gemma3-270m-q4_k_m.json"}
LENGTHS = [3, 70, 33, 12]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1000, 30000) for _ in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module", params=[pytest.param("gemma3-270m.gguf", marks=pytest.mark.slow), "smollm2.gguf"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(name: str, backend: str = "metal", **settings: Any) -> LLM:
    return LLM(real_model(name), backend=backend, **{"kv_type": "f32", "ctx": 1024, **settings})


@pytest.fixture(scope="module")
def metal(name: str) -> Iterator[LLM]:
    with opened(name) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(name: str) -> list[Completion]:
    with opened(name, prefix_sharing=False) as llm:
        return [llm.generate([p], GREEDY)[0] for p in prompts()]


def test_logits_and_greedy_ids_are_the_reference_s(name: str, metal: LLM) -> None:
    case = real_cases(CASES[name])[0]
    ids = (case["prompt_tokens"] + case["tokens"])[:24]
    with opened(name, "reference") as llm:
        expected = llm.logits(ids)
        greedy = llm.generate([ids[:8]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0].ids
    found = metal.logits(ids)
    assert np.abs(found - expected).max() < TOLERANCE
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()
    assert metal.generate([ids[:8]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0].ids == greedy


def test_logprobs_agree_with_llama_cpp(name: str, metal: LLM) -> None:
    """llama.cpp rounds activations to 8 bits, so it differs from exact products by some hundredths."""
    found = agreement(real_cases(CASES[name])[:1], metal.logits)
    assert found.argmax_equal > 0.9
    assert found.median < 0.1


@pytest.mark.slow
def test_in_a_batch_and_after_prefix_hits(metal: LLM, alone: list[Completion]) -> None:
    assert_close(metal.generate(prompts(), GREEDY), alone)
    again = metal.generate(prompts(), GREEDY)
    assert sum(c.cached_tokens for c in again) > 90
    assert_close(again, alone)


@pytest.mark.slow
def test_in_chunks(name: str, alone: list[Completion]) -> None:
    with opened(name, max_batch_tokens=16, prefix_sharing=False) as llm:
        assert_close(llm.generate(prompts(), GREEDY), alone)


@pytest.mark.slow
def test_with_drafts(name: str, alone: list[Completion]) -> None:
    with opened(name, draft="lookup") as llm:
        assert_close(llm.generate(prompts(), GREEDY), alone)


def test_without_metal_it_says_so_in_one_line(name: str) -> None:
    """Here, or on any machine without a Metal device."""
    import mlx.core as mx

    if mx.metal.is_available():
        pytest.skip("this machine has a Metal device")
    command = [sys.executable, "-m", "edgellm", "run", str(real_model(name)), "Hi", "--local", "--backend", "metal"]
    root = Path(__file__).parents[2]
    run = subprocess.run([*command, "-n", "2"], capture_output=True, text=True, env=os.environ, cwd=root)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stderr.splitlines() if "plain MLX ops" in line]
    assert len(lines) == 1, run.stderr
