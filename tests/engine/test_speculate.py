"""Speculation changes speed only: same tokens as plain decoding, for any drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import LLM, SamplingParams
from edgellm.engine.answer import Answer
from edgellm.engine.depth import Prospect
from edgellm.engine.draft import DraftModel
from edgellm.engine.lookup import PromptLookup
from edgellm.engine.output import Completion
from edgellm.engine.request import Request
from edgellm.engine.speculate import Speculator
from tests.engine.test_engine import Driver, alone, prompts, same
from tests.engine.test_sampler import Letters
from tests.support.guessing import KINDS, Forced, always_guess
from tests.support.scripted import ScriptedRunner, hash_script, model_config
from tests.support.tiny import tiny_gguf


def forced(kind: str) -> Any:
    """A speculator of that kind for the scripted model."""

    def right(answer: Answer, depth: int) -> list[int]:
        tokens, sampler = list(answer.request.token_ids), answer.sampler
        for number in sampler.peek(depth):
            guess = sampler.guess(hash_script(tokens), number)
            assert guess is not None
            tokens.append(guess)
            if sampler.suppose(guess):
                break
        sampler.take_back()
        return tokens[answer.request.num_tokens :]

    return Forced(kind, right, vocab=256)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("windows", [(0,), (48, 0)])
@pytest.mark.parametrize("batch, temperature", [(1, 0.0), (1, 0.9), (8, 0.0), (8, 0.9)])
def test_any_drafter_gives_the_plain_answer(
    kind: str, windows: tuple[int, ...], batch: int, temperature: float
) -> None:
    driver = Driver(windows, blocks=60, chunk=64)
    driver.engine.speculator = forced(kind)
    asked = prompts(batch, 90, seed=batch)
    numbers = [driver.add(p, temperature=temperature, max_tokens=40) for p in asked]
    driver.finish()
    for number, prompt in zip(numbers, asked, strict=True):
        assert same(driver.done[number], alone(prompt, windows, temperature=temperature, max_tokens=40))
    assert driver.engine.speculator.drafted > 0  # type: ignore[union-attr]
    if kind == "right" and batch == 1:
        assert len(driver.runner.steps) < 2 + 40 / 8 + 40 // 64 + 2


@pytest.mark.parametrize("swapped", [False, True])
def test_drafts_with_aborts_and_preemption(swapped: bool, tmp_path: Path) -> None:
    driver = Driver((48, 0), blocks=12, ctx=256, chunk=32, swap=tmp_path if swapped else None)
    driver.engine.speculator = forced("alternating")
    start = driver.free
    asked = prompts(6, 90, seed=5)
    numbers = [driver.add(p, max_tokens=90) for p in asked]
    for _ in range(20):
        driver.step()
    driver.engine.abort(numbers[2])
    driver.finish()
    for i, (number, prompt) in enumerate(zip(numbers, asked, strict=True)):
        if i != 2:
            assert same(driver.done[number], alone(prompt, (48, 0), max_tokens=90))
    assert driver.engine.stats()["preemptions"] > 0
    assert driver.free == start


ENDS: list[dict[str, Any]] = [
    {"max_tokens": 11},
    {"stop": ("x",)},
    {"logit_bias": {0: 48.0}},
    {"grammar": lambda: Letters("a fixed answer")},
]


@pytest.mark.parametrize("params", ENDS)
def test_answers_end_inside_an_accepted_run(params: dict[str, Any]) -> None:
    params = {"max_tokens": 60, "temperature": 0.9, **params}
    for seed in range(5):
        driver = Driver()
        driver.engine.speculator = forced("right")
        number = driver.add([seed + 1] * 9, seed=seed, **params)
        driver.finish()
        plain = alone([seed + 1] * 9, seed=seed, **params)
        assert same(driver.done[number], plain)
        assert driver.done[number].finish_reason == plain.finish_reason
        assert driver.engine.speculator.drafted > 0  # type: ignore[union-attr]


def with_draft_model(script: Any, draft_ctx: int = 512, blocks: int = 100, lookup: bool = False) -> Driver:
    """A driver whose draft is another scripted model."""
    driver = Driver(blocks=100)
    runner = ScriptedRunner(script, model_config(draft_ctx))
    draft = DraftModel(runner, model_config(draft_ctx), [blocks], 32, 512)
    speculator = Speculator(512, PromptLookup() if lookup else None, draft)
    always_guess(speculator)
    driver.engine.speculator = speculator
    return driver


def sometimes_wrong(tokens: Sequence[int]) -> np.ndarray:
    return hash_script(tokens if sum(tokens) % 4 else [*tokens, 1])


@pytest.mark.parametrize("script, least", [(hash_script, 0.99), (sometimes_wrong, 0.2)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_model_gives_the_plain_answer(script: Any, least: float, temperature: float) -> None:
    driver = with_draft_model(script)
    asked = prompts(4, 300, seed=1)
    numbers = [driver.add(p, temperature=temperature, max_tokens=50) for p in asked]
    while driver.engine.has_work:
        driver.step()
        driver.engine.speculator.model.check_integrity()  # type: ignore[union-attr]
    for number, prompt in zip(numbers, asked, strict=True):
        assert same(driver.done[number], alone(prompt, temperature=temperature, max_tokens=50))
    report = driver.engine.stats()["speculation"]
    assert report["drafted"] > 50
    assert report["acceptance"] >= least
    assert driver.engine.speculator.model.kv.pools[0].num_free == 100  # type: ignore[union-attr]


SETTINGS: list[dict[str, Any]] = [
    {"repeat_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0.0},
    {"logit_bias": {i: 9.0 for i in range(60, 80)}, "top_k": 30},
    {"grammar": lambda: Letters("thirty letters or so, no others")},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_draft_guesses_under_the_requests_own_settings(settings: dict[str, Any]) -> None:
    driver = with_draft_model(hash_script)
    number = driver.add([3] * 20, max_tokens=50, **settings)
    driver.finish()
    assert same(driver.done[number], alone([3] * 20, max_tokens=50, **settings))
    report = driver.done[number].timings["speculation"]
    assert report["drafted"] == report["accepted"] > 15


def test_a_draft_that_fell_behind_is_tried_again() -> None:
    driver = with_draft_model(hash_script)
    speculator = driver.engine.speculator
    assert isinstance(speculator, Speculator)
    controller, tries = speculator.controller, []

    def choose(prospects: Sequence[Prospect], context: int = 0) -> list[int]:
        tries.extend(prospect.limit > 0 for prospect in prospects)
        return [0] * len(prospects)

    controller.choose = choose  # type: ignore[method-assign]
    controller.pays = lambda *args: False  # type: ignore[method-assign]
    driver.add([3] * 20, max_tokens=100)
    controller.may_lose = lambda seconds: len(tries) > 50  # type: ignore[method-assign]
    driver.finish()
    assert not any(tries[:51]) and any(tries[51:])


def test_guesses_go_on_while_others_wait_for_room() -> None:
    driver = Driver(blocks=60, max_seqs=2)
    driver.engine.speculator = forced("right")
    numbers = [driver.add([n + 1] * 9, max_tokens=40, temperature=0) for n in range(6)]
    driver.finish()
    for n, number in enumerate(numbers):
        assert same(driver.done[number], alone([n + 1] * 9, max_tokens=40, temperature=0))
    # Two run at a time, three times; without guesses it would be 120 steps.
    assert len(driver.runner.steps) < 40


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    driver = with_draft_model(hash_script, lookup=True)
    for prompt in prompts(5, 60, seed=2):
        driver.add(prompt, max_tokens=20)
    driver.finish()
    speculator = driver.engine.speculator
    assert isinstance(speculator, Speculator)
    assert not (speculator._rates or speculator._accounts or speculator.lookup._indexes)  # type: ignore[union-attr]


def test_a_first_step_that_compiles_is_not_counted() -> None:
    driver = Driver()
    answer = driver.engine.answers[driver.add([3] * 20)]
    speculator = Speculator(512, PromptLookup(), None)
    speculator.controller.times.set(1, 1, 1.0)
    for seconds in (50.0, 1.5, 1.5):
        speculator.observe([(answer, 3, 4)], seconds)
    assert speculator.controller.total_s == pytest.approx(1.45 + 1.5 + 1.5)  # 1.45: three rows at 0.15 of a step
    assert speculator.controller.times.step(1, 4) == 1.5
    speculator.finished(answer)
    assert answer.speedup == pytest.approx(12 / 4.45)


def test_the_report_of_a_request() -> None:
    driver = with_draft_model(hash_script)
    number = driver.add([3] * 20, max_tokens=40, temperature=0)
    driver.finish()
    report = driver.done[number].timings["speculation"]
    assert report["drafted"] == report["accepted"] > 20
    assert set(report["by_position"]) == {1.0}
    assert report["mean_accepted"] > 3
    assert report["speedup"] is not None


def test_b33_a_draft_whose_context_is_full_stops_guessing() -> None:
    driver = with_draft_model(hash_script, draft_ctx=64)
    number = driver.add([3] * 20, max_tokens=180, temperature=0)
    driver.finish()
    assert same(driver.done[number], alone([3] * 20, max_tokens=180, temperature=0))
    assert 20 < driver.done[number].timings["speculation"]["drafted"] <= 44


def test_a_draft_without_blocks_or_with_a_failure_only_leaves_plain_decoding() -> None:
    for driver in (with_draft_model(hash_script, blocks=1), with_draft_model(lambda tokens: RuntimeError("boom"))):
        number = driver.add([3] * 40, max_tokens=30, temperature=0)
        driver.finish()
        assert same(driver.done[number], alone([3] * 40, max_tokens=30, temperature=0))


def test_lookup_follows_the_longest_match() -> None:
    lookup = PromptLookup()
    text = [1, 2, 3, 4, 50, 51, 52, 9, 3, 4, 60, 61, 8, 1, 2, 3, 4]
    assert lookup.propose(Request(0, text, 9), 3) == ([50, 51, 52], 4)
    assert lookup.propose(Request(1, [5, 6, 7], 9), 3) == ([], 0)
    assert lookup.propose(Request(2, [7, 8, 7, 8, 7, 8], 9), 5) == ([7, 8, 7, 8, 7], 4)
    assert lookup.propose(Request(3, [7, 8, 9, 5, 7, 8], 9), 2) == ([9, 5], 2)
    lookup.forget(0)


def test_lookup_guesses_a_repeated_text() -> None:
    driver = Driver()
    driver.engine.speculator = Speculator(512, PromptLookup(), None)
    repeating = [7, 8, 9, 10] * 30
    number = driver.add(repeating, max_tokens=200, temperature=0)
    driver.finish()
    assert same(driver.done[number], alone(repeating, max_tokens=200, temperature=0))


@pytest.mark.parametrize("windowed", [False, True])
def test_through_real_kernels(windowed: bool, tmp_path: Path) -> None:
    arch = "gemma2" if windowed else "llama"
    shape = {"context_length": 512, "chat_template": None, "window": 40}
    target = tiny_gguf(tmp_path / "target.gguf", arch, **shape)  # type: ignore[arg-type]
    asked = [p[:70] for p in prompts(8, 200, seed=3)]
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=3, logprobs=1, ignore_eos=True)
    answers: list[list[Completion]] = []
    for draft in (None, str(target), "lookup"):
        with LLM(target, backend="cpu", threads=2, memory=1 << 30, draft=draft) as llm:
            answers.append(llm.generate(asked, params) + [llm.generate([p], params)[0] for p in asked[:2]])
    for found in answers[1:]:
        assert [(c.ids, c.logprobs) for c in found] == [(c.ids, c.logprobs) for c in answers[0]]
