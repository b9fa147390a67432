"""The chunk size follows measured times. No clock: times are given."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from edgellm.engine.pacer import SIZES, STRETCH, Budget, Pacer

DECODE_S = 0.02
LIMIT = 4 * DECODE_S


class Walk:
    """A pacer that computes prompts beside four answers. `cost(n, depth)`: seconds of a chunk beyond the decoding."""

    def __init__(self, cost: Callable[[int, int], float]):
        self.cost, self.pacer = cost, Pacer(512)
        self.times: list[float] = []
        self.sizes: list[int] = []
        for _ in range(20):
            self.pacer.observe(DECODE_S, 0, 0, 4)

    def prompt(self, length: int, depth: int = 0, noise: Callable[[], float] = lambda: 1.0) -> None:
        end = depth + length
        while depth < end:
            n = self.pacer.budget(4).chunk(depth, end - depth)
            seconds = (DECODE_S + (self.cost(n, depth) if n else 0.0)) * noise()
            self.pacer.observe(seconds, n, depth, 4)
            self.times.append(seconds)
            self.sizes.append(n)
            depth += n
            assert len(self.times) < 20000

    def p99(self) -> float:
        return sorted(self.times)[int(0.99 * len(self.times))]


@pytest.mark.parametrize("token_s", [0.00005, 0.0003, 0.001, 0.004])
@pytest.mark.parametrize("pair_s", [0.0, 1e-7, 6e-7])
def test_mixed_steps_stay_near_a_decode_step_and_use_the_time_they_may_take(token_s: float, pair_s: float) -> None:
    walk = Walk(lambda n, depth: n * token_s + n * (depth + n / 2) * pair_s)
    walk.prompt(6000)
    walk.times, walk.sizes = [], []
    walk.prompt(6000)
    assert walk.p99() <= LIMIT
    for n, seconds in zip(walk.sizes[:-2], walk.times, strict=False):
        larger = next((size for size in SIZES if size > n), None)
        assert n == 0 or larger is None or DECODE_S + (seconds - DECODE_S) * larger / n > 0.75 * STRETCH * DECODE_S


def test_a_cost_that_every_chunk_has_is_counted_in() -> None:
    walk = Walk(lambda n, depth: 0.01 + n * 0.001)
    walk.prompt(6000)
    assert walk.p99() <= LIMIT
    zero, n = sorted(set(walk.sizes[50:-1]))
    larger = SIZES[SIZES.index(n) + 1]
    budget_s = STRETCH * DECODE_S - DECODE_S
    assert zero == 0 and 0.01 + n * 0.001 <= budget_s < larger * (0.01 / n + 0.001)  # by what n took


def test_what_was_learned_deep_in_one_prompt_holds_at_the_start_of_the_next() -> None:
    walk = Walk(lambda n, depth: n * 0.0006 + n * depth * 3e-7)
    for _ in range(3):
        walk.prompt(8000)
    walk.times = []
    walk.prompt(2000)
    walk.prompt(64, depth=8000)  # behind a cached prefix
    assert max(walk.times) <= LIMIT


def test_late_steps_now_and_then_change_little() -> None:
    rng = random.Random(0)
    calm, noisy = (Walk(lambda n, depth: n * 0.001) for _ in range(2))
    calm.prompt(6000)
    noisy.prompt(6000, noise=lambda: 20.0 if rng.random() < 0.1 else rng.uniform(0.95, 1.05))
    middle = len(noisy.sizes) // 2
    assert sorted(noisy.sizes)[middle] >= 0.6 * sorted(calm.sizes)[len(calm.sizes) // 2]


def test_what_a_step_has_spent_already_is_taken_off_the_prompts() -> None:
    walk = Walk(lambda n, depth: n * 0.001)
    walk.prompt(3000)
    usual = walk.pacer.budget(4).chunk(3000, 1000)
    walk.pacer.spent = DECODE_S
    fewer = walk.pacer.budget(4).chunk(3000, 1000)
    walk.pacer.spent = 10 * DECODE_S
    assert walk.pacer.budget(4).chunk(3000, 1000) == 0 < fewer <= usual - 16


def test_decoding_measured_while_something_disturbed_it_makes_no_large_chunks() -> None:
    walk = Walk(lambda n, depth: 0.004 + n * 0.001)
    walk.prompt(6000)
    usual = max(walk.sizes[50:])
    for _ in range(3):
        walk.pacer.observe(5 * DECODE_S, 0, 0, 4)
    walk.sizes = []
    walk.prompt(3000, depth=6000)
    assert max(walk.sizes) <= usual


def test_prompts_always_advance() -> None:
    walk = Walk(lambda n, depth: n * 10.0)
    walk.prompt(100)
    assert set(walk.sizes) <= {0, SIZES[0], 16} and walk.sizes.count(0) <= len(walk.sizes) // 8


def test_without_a_decode_step_to_compare_with_one_is_made() -> None:
    pacer = Pacer(512)
    assert 0 in [pacer.budget(4).tokens for _ in range(2)]
    assert [pacer.budget(4).tokens for _ in range(6)].count(0) == 3  # and nothing stands still until it was seen


def test_decoding_alone_is_seen_again_when_it_gets_dearer() -> None:
    walk = Walk(lambda n, depth: n * 0.001)
    walk.prompt(3000)
    few = walk.sizes[-2]
    for _ in range(40):  # four times as many answers; prompts keep coming
        budget = walk.pacer.budget(16)
        n = budget.chunk(0, 1000)
        walk.pacer.observe(4 * DECODE_S + n * 0.001, n, 0, 16)
    walk.prompt(3000, noise=lambda: 1.0)
    assert few > 2 and walk.sizes[-2] > 2


def test_nobody_waiting_means_no_limit() -> None:
    walk = Walk(lambda n, depth: n * 0.001)
    walk.prompt(3000)
    assert walk.pacer.budget(0).chunk(0, 10000) == 512


def test_several_prompts_share_the_tokens_of_a_step() -> None:
    budget = Budget(100)
    assert [budget.chunk(0, 60), budget.chunk(0, 60), budget.chunk(0, 60)] == [60, 40, 0]
    timed = Budget(512, seconds=0.1, cost=lambda depth: 0.001)
    assert [timed.chunk(0, 60), timed.chunk(0, 60), timed.chunk(0, 60)] == [60, 40, 0]


def test_a_chunk_takes_the_seconds_it_was_given() -> None:
    for depth in (0, 1000, 7000):
        n = Budget(512, 0.05, lambda depth: 0.0002 + depth * 2e-7).chunk(depth, 5000)
        larger = SIZES[SIZES.index(n) + 1]
        assert n * (0.0002 + depth * 2e-7) <= 0.05 < larger * (0.0002 + depth * 2e-7)
