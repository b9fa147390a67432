"""Prompts beside running answers, computed in passes that go on over several steps."""

from __future__ import annotations

import random
from math import inf

import pytest

from edgellm.engine import engine as engine_module
from edgellm.engine.request import Request
from edgellm.engine.scheduler import Schedule, ScheduledRequest
from edgellm.engine.slices import Slices
from tests.engine.test_engine import WINDOWS, Driver, alone, prompts
from tests.support.scripted import ScriptedRunner, hash_script, model_config


@pytest.fixture(autouse=True)
def every_prompt_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LONG", 0)


def talking(driver: Driver, n: int = 2) -> list[int]:
    """Answers that somebody reads along with, long enough to outlast a prompt."""
    requests = [driver.add([i + 1] * 20, max_tokens=200, ignore_eos=True) for i in range(n)]
    for _ in range(8):
        driver.step()
    return requests


@pytest.mark.parametrize("windows", WINDOWS)
def test_answers_are_those_of_requests_alone(windows: tuple[int, ...]) -> None:
    driver = Driver(windows, parts=3)
    talking(driver)
    asked = prompts(10, seed=3)
    numbers = []
    for prompt in asked:
        numbers.append(driver.add(prompt))
        driver.step()
    driver.finish()
    assert sum(len(p.granted) > 1 for p in driver.runner.passes) > 5
    for number, prompt in zip(numbers, asked, strict=True):
        expected = alone(prompt, windows)
        assert driver.done[number].ids == expected.ids
        assert driver.done[number].logprobs == expected.logprobs


def test_running_answers_get_a_token_in_every_step() -> None:
    driver = Driver(parts=4, ctx=1024)
    first, second = talking(driver)
    driver.add([9] * 500)
    for _ in range(20):
        driver.runner.steps.clear()
        driver.step()
        assert [item[:2] for item in driver.runner.steps[0]] == [(first, 1), (second, 1)]
    assert len(driver.runner.passes) >= 5


def test_who_leaves_takes_the_pass_along_and_the_others_begin_again() -> None:
    driver = Driver(parts=5)
    answers = talking(driver)
    stays, leaves = driver.add([7] * 20), driver.add([8] * 10)
    driver.step()
    assert {i.request.request_id for i in driver.runner.passes[-1].schedule.items} == {stays, leaves}
    driver.engine.abort(leaves)
    driver.step()
    assert [i.request.request_id for i in driver.runner.passes[-1].schedule.items] == [stays]
    driver.finish()
    assert driver.done[stays].ids == alone([7] * 20).ids
    assert {driver.done[answer].finish_reason for answer in answers} == {"length"}
    assert driver.free == [200]


@pytest.mark.parametrize("swap", [False, True])
def test_too_few_blocks_and_sudden_ends(swap: bool, tmp_path: object) -> None:
    for seed in range(2):
        print("seed", seed)
        rng = random.Random(seed)
        driver = Driver(blocks=24, parts=3, swap=tmp_path / str(seed) if swap else None)  # type: ignore[operator]
        free, asked = driver.free, {}
        for prompt in prompts(40, longest=150, seed=seed):
            asked[driver.add(prompt, max_tokens=60, ignore_eos=True)] = prompt
            for _ in range(rng.randint(1, 6)):
                driver.step()
            if rng.random() < 0.3:
                driver.engine.abort(rng.choice(list(asked)))
        driver.finish()
        assert driver.free == free
        assert driver.engine.metrics.totals["preemptions"]
        whole = [number for number in asked if driver.done[number].finish_reason == "length"]
        assert len(whole) > 20
        for number in whole:
            expected = alone(asked[number], max_tokens=60, ignore_eos=True)
            assert driver.done[number].ids == expected.ids


def test_a_failing_pass_ends_its_own_requests_only() -> None:
    driver = Driver(parts=3)
    answers = talking(driver)
    driver.runner.script = lambda tokens: ValueError("no such row") if tokens[0] == 99 else hash_script(tokens)
    driver.add([99] * 30)
    driver.finish()
    errors = [n for n, done in driver.done.items() if done.finish_reason == "error"]
    assert errors == [max(driver.done)]
    assert all(len(driver.done[answer].ids) == 200 for answer in answers)


def test_a_pass_that_nobody_waits_for_runs_to_its_end() -> None:
    driver = Driver(parts=50)
    answers = talking(driver)
    last = driver.add([5] * 30)
    driver.step()
    for answer in answers:
        driver.engine.abort(answer)
    driver.step()
    assert driver.runner.passes[-1].granted[-1] == inf
    driver.finish()
    assert driver.done[last].ids == alone([5] * 30).ids


def test_short_prompts_share_the_steps_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LONG", 30)
    driver = Driver(parts=3)
    talking(driver)
    driver.add([5] * 30)
    driver.step()
    assert not driver.runner.passes
    driver.add([6] * 31)
    for _ in range(3):
        driver.step()
    assert driver.runner.passes


class Pacing:
    """Slices of a pass over 32 tokens, beside decode steps of 10 ms."""

    def __init__(self) -> None:
        self.runner = ScriptedRunner(hash_script, model_config(), parts=100)
        self.slices = Slices(self.runner, 512)
        for _ in range(20):
            self.slices.observe(0.010, num_answers=4, alone=True)
        self.slices.begin(Schedule([ScheduledRequest(Request(0, [1] * 99, 1), 32, 0)]))

    def granted(self, decoding: float, times: int = 1, num_answers: int = 4) -> float:
        """Seconds for the slice of a step, the last of several alike; 0 for none."""
        [made] = self.runner.passes
        for _ in range(times):
            made.granted.clear()
            self.slices.observe(decoding, num_answers, alone=False)
            self.slices.advance(decoding, waited_for=True)
        return made.granted[-1] if made.granted else 0.0


def test_a_slice_fills_a_step_up_to_about_three_plain_ones() -> None:
    pacing = Pacing()
    assert pacing.granted(0.010) == pytest.approx(0.023)
    assert pacing.granted(0.018) == pytest.approx(0.015)  # disturbed: the slice gives way
    assert pacing.granted(0.034) == 0.0
    assert pacing.granted(0.012, times=9) == pytest.approx(0.021)


def test_dearer_decoding_leaves_prompts_half_a_plain_step() -> None:
    assert Pacing().granted(0.040, times=9) == pytest.approx(0.005)


def test_scant_time_is_left_alone_but_not_twice_in_a_row() -> None:
    pacing = Pacing()
    assert [pacing.granted(0.031) for _ in range(4)] == pytest.approx([0.0, 0.002, 0.0, 0.002])
    pacing = Pacing()
    assert [pacing.granted(taken) for taken in (0.031, 0.034, 0.031)] == pytest.approx([0.0, 0.0, 0.002])


def test_many_answers_are_used_to_longer_steps_than_few() -> None:
    """Else a prompt would hardly advance beside forty that came after one."""
    pacing = Pacing()
    assert pacing.granted(0.060, times=5, num_answers=40) == pytest.approx(0.138)
    assert pacing.granted(0.010) == pytest.approx(0.023)
