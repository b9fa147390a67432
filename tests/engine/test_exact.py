"""Same answer alone, in a batch, in chunks, after a prefix hit, a preemption, a swap: bit for bit, on real kernels.

Tiny random models on the CPU backend (float weights: its products are exact for any number of rows)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import LLM, SamplingParams
from edgellm.engine.output import Completion
from edgellm.errors import ContextLengthError
from tests.support.tiny import tiny_gguf

pytestmark = pytest.mark.thorough

MODELS = {"llama": {}, "gemma2": {"window": 40}, "phi3": {"window": 40}}


@pytest.fixture(scope="module", params=sorted(MODELS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("exact") / f"{request.param}.gguf"
    return tiny_gguf(file, request.param, context_length=512, chat_template=None, **MODELS[request.param])


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Completion]:
    """Each prompt alone, with a fresh cache."""
    answers = []
    with open_tiny(path, prefix_sharing=False) as llm:
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            answers += llm.generate([prompt], params)
    return answers


def open_tiny(path: Path, **settings: Any) -> LLM:
    return LLM(path, backend="cpu", threads=2, memory=1 << 30, **{"kv_type": "f16", **settings})


def make_prompts() -> Iterator[list[int]]:
    rng = random.Random(0)
    for i in range(12):
        yield [rng.randrange(3, 290) for _ in range([5, 180, 64, 33][i % 4] + i)]


PROMPTS = list(make_prompts())
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0.8 if i % 2 else 0, seed=i, logprobs=3, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.ids == b.ids, f"ids of request {i}"
        assert a.logprobs == b.logprobs, f"logprobs of request {i}"


def test_in_a_batch_of_twelve(path: Path, expected: list[Completion]) -> None:
    with open_tiny(path) as llm:
        assert_same(llm.generate(PROMPTS, PARAMS), expected)


def test_staggered_and_with_neighbours_that_leave(path: Path, expected: list[Completion]) -> None:
    with open_tiny(path) as llm:
        streams, others = [], []
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            streams.append(llm.submit(prompt, params))
            others.append(llm.submit(prompt[::-1], params))
            next(iter(streams[-1]))
            others[len(others) // 2].cancel()
        assert_same([stream.result() for stream in streams], expected)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_in_chunks(path: Path, expected: list[Completion], chunk: int) -> None:
    with open_tiny(path, max_batch_tokens=chunk, prefix_sharing=False) as llm:
        assert_same(llm.generate(PROMPTS[:4], PARAMS[:4]), expected[:4])


def test_after_a_prefix_hit(path: Path, expected: list[Completion]) -> None:
    with open_tiny(path) as llm:
        llm.generate([p[:-1] for p in PROMPTS], SamplingParams(max_tokens=1, temperature=0))
        found = llm.generate(PROMPTS, PARAMS)
        assert sum(c.cached_tokens for c in found) > 500
        assert_same(found, expected)


@pytest.mark.parametrize("swap_space", [0, 1 << 24])
def test_after_preemption(path: Path, swap_space: int) -> None:
    prompts = [p[:60] for p in PROMPTS[1:5]]
    params = SamplingParams(max_tokens=50, temperature=0.8, seed=1, logprobs=0, ignore_eos=True)
    with open_tiny(path, swap_space=swap_space, prefix_sharing=False) as llm:
        alone = [llm.generate([p], params)[0] for p in prompts]
        assert llm.stats()["preemptions"] == 0
        keep_free(llm, 5)
        assert_same(llm.generate(prompts, params), alone)
        # With windows in all layers the youngest only waits: the others' windows move on and free blocks.
        assert (llm.stats()["preemptions"] > 0) == (0 in (llm.config.windows or (0,)))


def keep_free(llm: LLM, n: int) -> None:
    """Leave n blocks of each pool to be used."""
    for pool in llm.engine.kv.pools:
        pool.num_blocks, pool._clean = n, list(range(n, 0, -1))


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
def test_with_every_kv_type(path: Path, kv_type: str) -> None:
    with open_tiny(path, kv_type=kv_type, prefix_sharing=False) as llm:
        alone = [llm.generate([p], s)[0] for p, s in zip(PROMPTS[:4], PARAMS[:4], strict=True)]
        assert_same(llm.generate(PROMPTS[:4], PARAMS[:4]), alone)


def test_logits_are_those_the_answer_was_drawn_from(path: Path, expected: list[Completion]) -> None:
    with open_tiny(path) as llm:
        for prompt, answer in zip(PROMPTS[:2], expected[:2], strict=True):
            rows = llm.logits([*prompt, *answer.ids])
            assert rows.shape == (len(prompt) + 12, 300)
            greedy = rows[len(prompt) - 1 : -1].argmax(axis=1).tolist()
            if answer is expected[0]:
                assert greedy == answer.ids


def test_b34_embeddings(path: Path) -> None:
    texts = ["a", "", "the other in the thing", [5] * 60, "ab" * 400]
    with open_tiny(path, ctx=64) as llm:
        vectors = llm.embed(texts)
        assert vectors.shape == (5, llm.config.dim) and vectors.dtype == np.float32
        assert np.isfinite(vectors).all()
        assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-3
        for text, vector in zip(texts, vectors, strict=True):
            assert np.array_equal(llm.embed([text])[0], vector)  # alone as in the batch
        assert np.array_equal(llm.embed([llm.tokenize(texts[4])[:64]])[0], vectors[4])
        with pytest.raises(ContextLengthError, match="64"):
            llm.embed([texts[4]], truncate=False)
        assert llm.embed([]).shape == (0, llm.config.dim)
