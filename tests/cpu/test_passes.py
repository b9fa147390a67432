"""Passes that are computed in parts: same bits as at once, and parts as long as was asked for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgellm import LLM
from edgellm.backends.cpu.passes import DEARER, OpTimes
from edgellm.engine.model_runner import Rows
from edgellm.engine.request import Request, Task
from edgellm.engine.scheduler import Schedule, ScheduledRequest
from tests.support.goldens import Golden


@pytest.fixture(scope="module", params=["Q4_K_M", "Q8_0"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(Golden("llama").path(request.param), backend="cpu", threads=2) as opened:
        yield opened


def sequence(llm: LLM, seed: int, n: int) -> Request:
    """A request that wants every row, its blocks taken and none of it computed."""
    ids = np.random.default_rng(seed).integers(3, llm.config.vocab_size, n).tolist()
    request = Request(-seed, ids, 1, Task.LOGITS, share_prefix=False)
    assert llm.engine.kv.admit(request, 0) and llm.engine.kv.allocate(request, n)
    return request


def rows_of(llm: LLM, request: Request, n: int) -> Rows:
    [rows] = llm.engine.runner.run(Schedule([ScheduledRequest(request, n, 0)]))
    return rows.copy()


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 9, 17, 40, 100])
def test_in_parts_beside_others_the_bits_are_the_same(llm: LLM, n: int) -> None:
    runner = llm.engine.runner
    prompt, other = sequence(llm, 1, 160), sequence(llm, 2, 60)
    rows_of(llm, prompt, 50)
    rows_of(llm, other, 59)
    prompt.num_computed_tokens, other.num_computed_tokens = 50, 59
    expected, beside = rows_of(llm, prompt, n), rows_of(llm, other, 1)
    again = sequence(llm, 1, 160)
    rows_of(llm, again, 50)
    again.num_computed_tokens = 50
    begun, parts = runner.begin(Schedule([ScheduledRequest(again, n, 0)])), 1
    while not begun.advance(1e-6):
        parts += 1
        np.testing.assert_array_equal(rows_of(llm, other, 1), beside)
    [found] = begun.rows()
    np.testing.assert_array_equal(found, expected)
    assert parts > 10
    for request in (prompt, other, again):
        llm.engine.kv.free(request)


def test_a_run_goes_as_far_as_its_time() -> None:
    times = OpTimes(128)
    assert times.reach(0, 1.0) == 2  # nothing known: a sixty-fourth
    times.learn(0, 2, 0.002)
    assert times.reach(2, 0.0105) == 12  # others are taken to be like those
    times.learn(2, 12, 0.020)
    assert times.reach(0, 0.0065) == 4  # 1, 1, 2, 2 ms
    assert times.reach(12, float("inf")) == 128
    times.scale(32)
    times.scale(64)
    assert times.reach(0, 0.0121) == 4


def test_a_new_tape_starts_from_the_times_of_another() -> None:
    """Of one for more rows or sequences: the same ops, perhaps some less or more at the end."""
    times = OpTimes(4)
    times.scale(64)
    times.learn(0, 4, 0.004)
    for n_ops, reached in ((3, 2), (6, 2)):
        other = OpTimes(n_ops, times)
        other.scale(32)
        assert other.reach(0, 0.0011) == reached
        assert other.reach(0, 1.0) == n_ops
        other.learn(0, 2, 0.002)
    assert times.reach(0, 0.0031) == 3, "the other tape's times are its own"


def test_two_slow_runs_in_a_row_say_that_the_machine_is_slow() -> None:
    times = OpTimes(40)
    times.learn(0, 40, 0.040)
    times.learn(0, 10, 0.020)
    assert times.reach(20, 0.0041) == 24
    times.learn(10, 20, 0.030)
    assert times.reach(20, 0.0041) == 22  # both took twice as long or more
    times.learn(20, 22, 0.002)
    assert times.reach(22, 0.0041) == 26


def test_a_disturbed_run_says_little_and_a_quick_one_all() -> None:
    times = OpTimes(10)
    times.learn(0, 10, 0.010)
    times.learn(0, 10, 1.0)
    assert times.reach(0, 10 * 0.001 * DEARER + 1e-9) == 10
    times.learn(0, 10, 0.005)
    assert times.reach(0, 0.0026) == 5
