"""Bit-exactness on real quantised models: alone, in a batch, in chunks, after prefix hits, preemption and swap."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM, SamplingParams
from edgellm.engine.answer import Answer
from edgellm.engine.output import Completion
from tests.engine.test_exact import assert_same, keep_free
from tests.support.guessing import KINDS, Forced
from tests.support.real import real_model

pytestmark = pytest.mark.real

LENGTHS = [3, 40, 150, 33, 64, 700, 20, 90, 31, 65, 12, 128]
"""The long one passes gemma3's window of 512."""


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1000, 30000) for _ in range(n)] for n in LENGTHS]


PARAMS = [
    SamplingParams(max_tokens=16, temperature=0.8 * (i % 2), seed=i, logprobs=2, ignore_eos=True) for i in range(12)
]


@pytest.fixture(scope="module", params=["smollm2.gguf", "gemma3-270m.gguf"])
def path(request: pytest.FixtureRequest) -> Path:
    return real_model(request.param)


def opened(path: Path, **settings: Any) -> LLM:
    return LLM(path, **{"backend": "cpu", "threads": 2, "ctx": 1024, **settings})


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Completion]:
    with opened(path, prefix_sharing=False, threads=1) as llm:
        return [llm.generate([p], s)[0] for p, s in zip(prompts(), PARAMS, strict=True)]


def test_staggered_batch_with_aborts(path: Path, expected: list[Completion]) -> None:
    with opened(path) as llm:
        streams, others = [], []
        for prompt, params in zip(prompts(), PARAMS, strict=True):
            streams.append(llm.submit(prompt, params))
            others.append(llm.submit(prompt[::-1][:50], params))
            next(iter(streams[-1]))
            others[len(others) // 2].cancel()
        assert_same([stream.result() for stream in streams], expected)
        assert_same(llm.generate(prompts(), PARAMS), expected)  # every prefix is cached now


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks(path: Path, expected: list[Completion], chunk: int) -> None:
    few = [2] if chunk == 1 else [2, 5]
    with opened(path, max_batch_tokens=chunk, prefix_sharing=False) as llm:
        found = [llm.generate([prompts()[i]], PARAMS[i])[0] for i in few]
    assert_same(found, [expected[i] for i in few])


@pytest.mark.parametrize("swap_space", [0, 1 << 28])
def test_preemption_and_swap(path: Path, swap_space: int) -> None:
    asked = [p[:60] for p in prompts() if len(p) >= 60]
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=1, logprobs=0, ignore_eos=True)
    with opened(path, swap_space=swap_space, prefix_sharing=False) as llm:
        alone = [llm.generate([p], params)[0] for p in asked]
        keep_free(llm, 9)
        assert_same(llm.generate(asked, params), alone)
        assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_speculation(path: Path, expected: list[Completion], draft: str) -> None:
    with opened(path, draft=str(path) if draft == "itself" else draft) as llm:
        assert_same(llm.generate(prompts(), PARAMS), expected)


NEAR_THE_WINDOW = [490, 505, 60, 62, 64, 58, 60, 61]
"""Prompts that answers of 48 tokens carry over gemma3's window of 512, and six short ones."""


@pytest.fixture(scope="module")
def crossing(path: Path) -> dict[tuple[int, ...], list[int]]:
    """Greedy answers of plain decoding by prompt."""
    rng = random.Random(1)
    asked = [[rng.randrange(1000, 30000) for _ in range(n)] for n in NEAR_THE_WINDOW]
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    with opened(path, prefix_sharing=False) as llm:
        return {tuple(prompt): llm.generate([prompt], params)[0].ids for prompt in asked}


@pytest.mark.parametrize("kind", [k if k == "alternating" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_any_drafter(path: Path, crossing: dict[tuple[int, ...], list[int]], kind: str) -> None:
    """Right, wrong, alternating and random guesses: alone, in a batch of 8, with aborts, with preemption."""

    def right(answer: Answer, depth: int) -> list[int]:
        prompt, done = answer.request.token_ids, answer.request.num_new_tokens
        ids = crossing.get(tuple(prompt[: len(prompt) - done]), [0] * 48)
        return ids[done : done + depth]

    asked, expected = [list(prompt) for prompt in crossing], list(crossing.values())
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    with opened(path, prefix_sharing=False) as llm:
        forced = Forced(kind, right, vocab=llm.config.vocab_size)
        llm.engine.speculator = forced  # type: ignore[assignment]
        for prompt, ids in zip(asked[:3], expected, strict=False):
            assert llm.generate([prompt], params)[0].ids == ids
        streams = [llm.submit(prompt, params) for prompt in asked]
        other = llm.submit(asked[3][::-1], params)
        next(iter(other))
        other.cancel()
        assert [stream.result().ids for stream in streams] == expected
        alone = forced.drafted
        keep_free(llm, 9)
        assert [done.ids for done in llm.generate(asked[2:], params)] == expected[2:]
        assert llm.stats()["preemptions"] > 0
        assert alone > 100 and forced.drafted > alone
