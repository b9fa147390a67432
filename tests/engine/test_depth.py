"""The depth controller: the best depth by measured times, and never much lost to finding out."""

from __future__ import annotations

from itertools import pairwise

import pytest

from edgellm.engine.depth import FIRST_REFRESH, REFRESH, Acceptance, DepthController, Prospect
from edgellm.engine.step_times import StepTimes


def controller(draft_step: float, row: float = 0.05) -> DepthController:
    depths = DepthController(7)
    for rows in range(1, 9):
        depths.times.set(1, rows, 1.0 + row * (rows - 1))
    depths.times.set_draft(draft_step)
    return depths


def one(rate: float, limit: int = 7, costs: bool = True) -> list[Prospect]:
    return [Prospect(rate, limit, costs)]


def test_the_depth_is_the_best_by_the_formula() -> None:
    depths = controller(draft_step=0.1)
    for rate in (0.0, 0.3, 0.5, 0.7, 0.9, 0.99):
        speeds = [sum(rate**i for i in range(k + 1)) / (0.1 * k + 1 + 0.05 * k) for k in range(8)]
        best = max(range(8), key=lambda k: speeds[k])
        expected = best if speeds[best] > 1.03 * speeds[0] else 0
        assert depths.choose(one(rate)) == [expected]


def test_a_slow_draft_is_not_asked_but_for_rare_probes() -> None:
    depths = controller(draft_step=2.0)
    drafted = 0
    for _ in range(1000):
        [depth] = depths.choose(one(0.9))
        drafted += depth > 0
        seconds = 1.0 if not depth else 1 + 0.05 * depth + 2.0 * depth
        depths.account(1, 1 + depth, 1, seconds)
    assert 1 <= drafted <= 10
    assert depths.probe_s <= 0.02 * depths.total_s


def test_limits_and_batches() -> None:
    depths = controller(draft_step=0.0)
    assert depths.choose(one(0.9, 2, costs=False)) == [2]
    assert depths.choose(one(0.9, 0, costs=False)) == [0]
    for rows in range(2, 17):
        depths.times.set(2, rows, 1.0 + 0.05 * (rows - 2))
    likely, unlikely = depths.choose([*one(0.95, costs=False), *one(0.05, costs=False)])
    assert likely >= 5 and unlikely == 0


def test_acceptance_follows_what_happens() -> None:
    acceptance = Acceptance(0.7)
    assert acceptance.rate == pytest.approx(0.7)
    for _ in range(40):
        acceptance.observe(drafted=4, accepted=0)
    assert acceptance.rate < 0.02
    for _ in range(40):
        acceptance.observe(drafted=4, accepted=4)
    assert acceptance.rate > 0.95


def test_times_hold_for_other_contexts() -> None:
    times = StepTimes()
    times.context_s = 0.001
    times.set(1, 1, 1.0)
    for seconds in (9.0, 3.2, 3.2):  # the first may hold compiling
        times.observe(1, 4, seconds, context=2000)
    assert times.plain(1, 500) == pytest.approx(1.5)
    assert times.step(1, 4, 500) == pytest.approx(1.7)
    assert times.step(1, 2, 500) == pytest.approx(1.5 + 0.2 / 3)


def test_a_quick_step_ends_a_disturbance_for_choices_not_for_the_account() -> None:
    times = StepTimes()
    for seconds in (1.0, 2.0, 2.0, 2.0, 1.1):
        times.set(1, 1, seconds)
    assert times.plain(1) == 2.0  # the median
    assert times.step(1, 1) == 1.1
    times.set(1, 1, 3.0)
    assert times.step(1, 1) == times.plain(1) == 2.0


def test_plain_decoding_is_measured_again_now_and_then() -> None:
    depths = controller(draft_step=0.0)
    chosen = []
    for _ in range(3 * REFRESH):
        [depth] = depths.choose(one(0.9))
        chosen.append(depth)
        depths.account(1, 1 + depth, 1 + depth, 1.0)
    plain = [i for i, depth in enumerate(chosen) if not depth]
    gaps = [b - a - 1 for a, b in pairwise([-1, *plain])]
    assert gaps == [FIRST_REFRESH, 16, 32, REFRESH, REFRESH]


def test_a_disturbance_does_not_make_a_slow_draft_pay_for_long() -> None:
    depths = controller(draft_step=1.0)  # as slow as the target: even right guesses lose
    drafted = 0
    for i in range(200):
        [depth] = depths.choose(one(0.99))
        drafted += depth > 0
        took = 1.6 if 20 <= i < 26 else 1.0  # steps of the target; the draft's passes are as quick as ever
        depths.times.observe(1, 1 + depth, took + 0.05 * depth)
        depths.account(1, 1 + depth, 1 + depth, took + 1.05 * depth)
    assert 0 < drafted <= FIRST_REFRESH + 2


def test_no_probe_follows_another() -> None:
    depths = controller(draft_step=1.2)
    depths.total_s = 10_000.0  # many probes would be affordable
    chosen = []
    for _ in range(20):
        [depth] = depths.choose(one(0.9))
        chosen.append(depth)
        depths.account(1, 1 + depth, 1, 1 + 1.25 * depth)
    assert chosen == [2, 0] * 10


def test_catching_up_must_pay() -> None:
    depths = controller(draft_step=0.1)
    depths.catch_up_s.add(0.05)
    # At 0.8, four guesses are best: 0.476 a token, 0.495 less than plain with its margin.
    best = min((0.1 * k + 1 + 0.05 * k) / sum(0.8**i for i in range(k + 1)) for k in range(1, 8))
    gain = 1 / 1.03 - best
    assert depths.pays(100, int(5 / gain) + 1, 0.8)
    assert not depths.pays(100, int(5 / gain), 0.8)
    assert not depths.pays(1, 100, 0.05)
