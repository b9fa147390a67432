"""Whole runs over a scripted model whose rows are token ids: lost, moved or wrongly shared blocks change the answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.config import EngineConfig, SamplingParams
from edgellm.engine.engine import Engine
from edgellm.engine.output import Completion
from edgellm.engine.pacer import Budget
from edgellm.engine.request import Task
from edgellm.engine.swap import SwapFile
from edgellm.memory import window_blocks
from tests.support.scripted import ByteTokenizer, ScriptedRunner, hash_script, model_config

WINDOWS = [(0,), (48, 0), (48,)]


class Driver:
    """An engine stepped by hand, checked after every step."""

    def __init__(
        self,
        windows: tuple[int, ...] = (0,),
        blocks: int = 200,
        swap: Path | None = None,
        chunk: int | None = None,
        ctx: int = 512,
        parts: int = 0,
        **config: Any,
    ):
        shape = model_config(ctx, windows)
        self.runner = ScriptedRunner(hash_script, shape, parts=parts)
        groups = len(shape.cache_groups)
        space = SwapFile(self.runner, groups, 1 << 20, swap) if swap else None
        settings = EngineConfig(ctx=ctx, **{"max_seqs": 16, **config})
        self.engine = Engine(settings, shape, self.runner, ByteTokenizer(), [blocks] * groups, space)
        if chunk is not None:
            self.engine.pacer.budget = lambda num_settled: Budget(chunk)  # type: ignore[method-assign]
        self.done: dict[int, Completion] = {}

    def add(self, prompt: list[int], **params: Any) -> int:
        settings = {"max_tokens": 24, "temperature": 0.9, "seed": 7, "logprobs": 2, **params}
        return self.engine.add_request(prompt, SamplingParams(**settings)).request_id

    def step(self) -> None:
        for request_id, event in self.engine.step():
            if event.completion is not None:
                self.done[request_id] = event.completion
        self.engine.check_integrity()

    def finish(self, limit: int = 5000) -> None:
        while self.engine.has_work:
            self.step()
            limit -= 1
            assert limit, "the engine does not come to an end"

    @property
    def free(self) -> list[int]:
        return [pool.num_free for pool in self.engine.kv.pools]


def prompts(n: int, longest: int = 200, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 256) for _ in range(rng.randint(1, longest))] for _ in range(n)]


def alone(prompt: list[int], windows: tuple[int, ...] = (0,), **params: Any) -> Completion:
    driver = Driver(windows)
    number = driver.add(prompt, **params)
    driver.finish()
    return driver.done[number]


def same(a: Completion, b: Completion) -> bool:
    return (a.ids, a.logprobs, a.text) == (b.ids, b.logprobs, b.text)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks_do_not_change_the_answer(windows: tuple[int, ...], chunk: int) -> None:
    [prompt] = prompts(1)
    driver = Driver(windows, chunk=chunk)
    number = driver.add(prompt)
    driver.finish()
    assert same(driver.done[number], alone(prompt, windows))


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("blocks, swapped", [(200, False), (14, False), (14, True)])
def test_twelve_staggered_requests_with_aborts(
    windows: tuple[int, ...], blocks: int, swapped: bool, tmp_path: Path
) -> None:
    driver = Driver(windows, blocks, tmp_path if swapped else None, chunk=64, ctx=320)
    start = driver.free
    asked, aborted = prompts(12), {3, 8}
    numbers = []
    for i, prompt in enumerate(asked):
        numbers.append(driver.add(prompt, max_tokens=70))
        for _ in range(2):
            driver.step()
        if i in aborted:
            driver.engine.abort(numbers[-1])
    driver.finish()
    for i, (number, prompt) in enumerate(zip(numbers, asked, strict=True)):
        if i in aborted:
            assert driver.done[number].finish_reason == "abort"
        else:
            assert same(driver.done[number], alone(prompt, windows, max_tokens=70)), f"request {i}"
    assert driver.free == start
    if blocks == 14 and windows == (0,):
        assert driver.engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_prefix_hit_does_not_change_the_answer(windows: tuple[int, ...]) -> None:
    [prompt] = prompts(1, seed=4)
    prompt = (prompt * 200)[:200]
    driver = Driver(windows)
    first = driver.add(prompt)
    driver.finish()
    turn = [*prompt, *driver.done[first].ids, 5, 6, 7]
    second, again = driver.add(turn), driver.add(prompt)
    driver.finish()
    assert driver.done[second].cached_tokens >= len(turn) - 3 - 32
    assert driver.done[again].cached_tokens >= (192 if windows == (0,) else 0)
    assert same(driver.done[second], alone(turn, windows))
    assert same(driver.done[again], driver.done[first])


def test_a_swapped_request_is_not_computed_again(tmp_path: Path) -> None:
    computed = []
    for folder in (None, tmp_path):
        driver = Driver((0,), blocks=12, swap=folder, ctx=256)
        numbers = [driver.add(p, max_tokens=60) for p in prompts(4, 100, seed=2)]
        driver.finish()
        assert driver.engine.stats()["preemptions"] > 0
        assert [len(driver.done[n].ids) for n in numbers] == [60] * 4
        computed.append(sum(tokens for step in driver.runner.steps for _, tokens, _ in step))
    assert computed[1] < computed[0]
    assert computed[1] == sum(len(p) + 59 for p in prompts(4, 100, seed=2))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("task", [Task.LOGITS, Task.HIDDEN])
def test_rows_of_every_position_come_once_also_after_a_preemption(task: Task, swapped: bool, tmp_path: Path) -> None:
    older, prompt = list(range(1, 21)), list(range(1, 151))
    driver = Driver(blocks=7, chunk=3, swap=tmp_path if swapped else None, prefix_sharing=False)
    driver.add(older, max_tokens=60, ignore_eos=True)
    request = driver.engine.add_request(prompt, SamplingParams(max_tokens=0), task)
    answer = driver.engine.answers[request.request_id]
    driver.finish()
    assert request.num_preemptions
    expected = [driver.runner._row(prompt[: i + 1], task) for i in range(150)]
    np.testing.assert_array_equal(np.concatenate(answer.rows), np.array(expected, np.float32))


def test_what_cannot_be_swapped_in_is_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver((48, 0), blocks=12, swap=tmp_path, ctx=256)
    asked = prompts(4, 100, seed=2)
    numbers = [driver.add(p, max_tokens=60) for p in asked]
    space = driver.engine.scheduler.swap
    assert isinstance(space, SwapFile)
    while driver.engine.has_work:
        for file in space._files:
            file.truncate(0)
        driver.step()
    assert "swapping in failed" in caplog.text and space.used == 0
    for number, prompt in zip(numbers, asked, strict=True):
        assert same(driver.done[number], alone(prompt, (48, 0), max_tokens=60))


def test_long_prompts_do_not_hold_up_running_answers() -> None:
    driver = Driver(chunk=16)
    running = [driver.add([i + 1] * 4, max_tokens=100) for i in range(4)]
    driver.step()
    driver.add([9] * 400)
    for _ in range(20):
        driver.step()
        items = driver.runner.steps[-1]
        assert [tokens for number, tokens, _ in items if number in running] == [1] * 4
        assert sum(tokens for number, tokens, _ in items if number not in running) <= 16


def test_a_prompt_that_sits_a_step_out_is_no_part_of_it() -> None:
    """A sequence without tokens would make a step with a draft look like plain decoding."""
    driver = Driver()
    driver.add([1] * 10)
    driver.step()
    driver.engine.pacer.budget = lambda num_settled: Budget(16, 0.0, lambda depth: 1.0, 0)  # type: ignore[method-assign]
    driver.add([2] * 10)
    driver.step()
    assert len(driver.engine.scheduler.running) == 2
    assert driver.runner.steps == [[(0, 10, 0)], [(0, 1, 0)]]


def test_prompts_that_come_together_are_computed_together() -> None:
    driver = Driver(max_batch_tokens=64)
    numbers = [driver.add([i + 1] * 32, max_tokens=30) for i in range(8)]
    driver.finish()
    assert [sum(n for _, n, _ in step if n > 1) for step in driver.runner.steps[:4]] == [64] * 4
    assert len(driver.runner.steps) == 4 + 29
    assert sorted(driver.done) == numbers


def test_first_come_first_served() -> None:
    driver = Driver(max_seqs=2)
    order = [driver.add([1] * 20, max_tokens=4) for _ in range(6)]
    driver.finish()
    assert list(driver.done) == order


def test_a_pool_too_small_loses_nothing_and_hangs_nothing() -> None:
    driver = Driver(blocks=17, ctx=512)  # one context and one block
    start = driver.free
    numbers = [driver.add(p, max_tokens=40, ignore_eos=True) for p in prompts(16, 400, seed=3)]
    driver.finish(20_000)
    assert sorted(driver.done) == numbers
    assert all(len(c.ids) == 40 and c.finish_reason == "length" for c in driver.done.values())
    assert driver.free == start


def test_a_context_may_fill_the_whole_pool() -> None:
    for swap_blocks in (16,):
        driver = Driver(blocks=swap_blocks, ctx=512)
        driver.add([1] * 300, max_tokens=-2)
        driver.add([2] * 300, max_tokens=-2)
        driver.finish()
        assert [len(c.ids) for c in driver.done.values()] == [212, 212]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("task", [Task.LOGITS, Task.HIDDEN])
def test_rows_of_a_text_that_fills_the_context_fit_the_smallest_pool(task: Task, windows: tuple[int, ...]) -> None:
    driver = Driver(windows, blocks=8, ctx=256)
    request = driver.engine.add_request([1] * 256, SamplingParams(max_tokens=0), task)
    rows = driver.engine.answers[request.request_id].rows
    driver.finish(20)
    assert sum(map(len, rows)) == 256


def test_logits_of_a_long_text_fit_a_pool_of_one_window() -> None:
    """A window's blocks hold one chunk beside it: also a step that may carry more tokens computes no longer one."""
    [group] = model_config(2048, (48,)).cache_groups
    driver = Driver((48,), blocks=window_blocks(group, 2048), ctx=2048, max_batch_tokens=4096)
    prompt = [1 + i % 255 for i in range(1500)]
    request = driver.engine.add_request(prompt, SamplingParams(max_tokens=0), Task.LOGITS)
    rows = driver.engine.answers[request.request_id].rows
    driver.finish()
    assert sum(map(len, rows)) == 1500
    np.testing.assert_array_equal(rows[-1][-1], driver.runner._row(prompt, Task.LOGITS))


@pytest.mark.parametrize("windows", WINDOWS)
def test_b28_a_thousand_random_aborts_leak_nothing(windows: tuple[int, ...], tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    driver = Driver(windows, blocks=30, swap=tmp_path, chunk=48, ctx=320)
    start = driver.free
    numbers: list[int] = []
    for _ in range(1000):
        numbers.append(driver.add(prompts(1, 150, rng.random())[0], max_tokens=8))  # type: ignore[arg-type]
        if rng.random() < 0.4:
            driver.step()
        driver.engine.abort(rng.choice(numbers[-8:]))
        if len(driver.engine.answers) > 12:
            driver.engine.abort(min(driver.engine.answers))
    driver.finish()
    assert sorted(driver.done) == numbers
    assert driver.free == start


def test_an_abort_takes_effect_before_the_next_step() -> None:
    driver = Driver(chunk=8)
    prefilling, waiting = driver.add([1] * 200), driver.add([2] * 10)
    driver.step()
    driver.engine.abort(prefilling)
    driver.engine.abort(waiting)
    driver.step()
    assert len(driver.runner.steps) == 1
    assert {n: c.finish_reason for n, c in driver.done.items()} == {prefilling: "abort", waiting: "abort"}


def test_long_rope_picks_the_variant_by_prompt_and_answer() -> None:
    from dataclasses import replace

    from edgellm.models.config import RopeConfig

    driver = Driver()
    rope = RopeConfig(n_dims=8, scaling="longrope", original_context=64)
    driver.engine.model_config = replace(driver.engine.model_config, rope=rope)
    variants = [driver.engine.add_request([1] * 40, SamplingParams(max_tokens=n)).rope_variant for n in (24, 25, -1)]
    assert variants == [0, 1, 1]


def test_swap_space_is_bounded_and_given_back(tmp_path: Path) -> None:
    driver = Driver(swap=tmp_path)
    space = SwapFile(driver.runner, 1, limit=3 * 132, folder=tmp_path)
    driver.runner.rows[0] = {b: [b] * 32 for b in range(1, 9)}
    assert space.save(1, [[0, 1, 2]])
    assert not space.save(2, [[3, 4]])
    assert space.save(3, [[5]])
    space.load(1, [[0, 7, 8]])
    assert (driver.runner.rows[0][7], driver.runner.rows[0][8]) == ([1] * 32, [2] * 32)
    assert space.used == 132
    assert space.save(2, [[3, 4]])
    space.drop(2)
    space.drop(3)
    space.drop(99)
    assert space.used == 0
    space.close()


def test_stats_count_what_happened() -> None:
    driver = Driver()
    driver.add([1] * 40, max_tokens=5)
    driver.add([2] * 30, max_tokens=5)
    driver.finish()
    stats = driver.engine.stats()
    assert stats["finish_reasons"] == {"length": 2}
    assert (stats["prompt_tokens"], stats["prefill_tokens"], stats["new_tokens"]) == (70, 70, 10)
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["cache_groups"][0]["free"] == 200
