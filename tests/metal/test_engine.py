"""The engine on the Metal backend (plain ops here): in batches, in chunks, after prefix hits, with windows, preempted
and with drafts, a request gets the ids it gets alone wherever the best two tokens are clearly apart, and its
logprobs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")

from edgellm import LLM, SamplingParams
from edgellm.engine.output import Completion
from tests.metal.closeness import assert_close
from tests.support.goldens import DATA, Golden
from tests.support.tiny import tiny_gguf

MODELS: dict[str, dict[str, Any]] = {"llama": {}, "gemma2": {"window": 40}, "phi3": {"window": 40}}
LENGTHS = [5, 180, 64, 33, 9, 185, 69, 38]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 290) for _ in range(n)] for n in LENGTHS]


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gemma2", "phi3"))]
)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("metal") / f"{request.param}.gguf"
    return tiny_gguf(file, request.param, context_length=512, chat_template=None, **MODELS[request.param])


def opened(path: Path, **settings: Any) -> LLM:
    return LLM(path, backend="metal", memory=1 << 30, **{"kv_type": "f32", **settings})


@pytest.fixture(scope="module")
def alone(path: Path) -> list[Completion]:
    with opened(path, prefix_sharing=False) as llm:
        return [llm.generate([p], GREEDY)[0] for p in prompts()]


@pytest.fixture(scope="module")
def shared(path: Path) -> Iterator[LLM]:
    with opened(path) as llm:
        yield llm


def test_in_a_batch_and_after_prefix_hits(shared: LLM, alone: list[Completion]) -> None:
    assert_close(shared.generate(prompts(), GREEDY), alone)
    again = shared.generate(prompts(), GREEDY)
    assert sum(c.cached_tokens for c in again) > 300
    assert_close(again, alone)


def test_staggered_with_neighbours_that_leave(shared: LLM, alone: list[Completion]) -> None:
    streams, others = [], []
    for prompt in prompts():
        streams.append(shared.submit(prompt, GREEDY))
        others.append(shared.submit(prompt[::-1], GREEDY))
        next(iter(streams[-1]))
        others[len(others) // 2].cancel()
    assert_close([stream.result() for stream in streams], alone)


@pytest.mark.parametrize("chunk", [7, pytest.param(64, marks=pytest.mark.thorough)])
def test_in_chunks(path: Path, alone: list[Completion], chunk: int) -> None:
    with opened(path, max_batch_tokens=chunk, prefix_sharing=False) as llm:
        assert_close(llm.generate(prompts()[:4], GREEDY), alone[:4])


@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_with_drafts(path: Path, alone: list[Completion], draft: str) -> None:
    with opened(path, draft=str(path) if draft == "itself" else draft) as llm:
        assert_close(llm.generate(prompts(), GREEDY), alone)


@pytest.mark.parametrize("kv_type", ["f16"])
def test_with_another_cache_type(path: Path, kv_type: str) -> None:
    with opened(path, kv_type=kv_type, prefix_sharing=False) as llm:
        one_by_one = [llm.generate([p], GREEDY)[0] for p in prompts()[:4]]
        assert_close(llm.generate(prompts()[:4], GREEDY), one_by_one)


@pytest.mark.parametrize("swap_space", [pytest.param(0, marks=pytest.mark.thorough), 1 << 24])
def test_after_preemption(path: Path, swap_space: int) -> None:
    asked = [p[:60] for p in prompts() if len(p) >= 60]
    params = SamplingParams(max_tokens=50, temperature=0, logprobs=2, ignore_eos=True)
    with opened(path, swap_space=swap_space, prefix_sharing=False) as llm:
        one_by_one = [llm.generate([p], params)[0] for p in asked]
        for pool in llm.engine.kv.pools:  # five blocks for three requests
            pool.num_blocks, pool._clean = 5, list(range(5, 0, -1))
        assert_close(llm.generate(asked, params), one_by_one)
        assert (llm.stats()["preemptions"] > 0) == (0 in (llm.config.windows or (0,)))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_the_engine_reaches_the_golden(name: str) -> None:
    golden = Golden(name, DATA / "goldens")
    params = SamplingParams(max_tokens=len(golden.greedy), temperature=0, ignore_eos=True)
    with LLM(golden.path(), backend="metal", kv_type="f32", draft="lookup") as llm:
        answer, _ = llm.generate([golden.prompt, golden.ids(1)], params)
        assert answer.ids == golden.greedy
