"""The chunk size follows measured times. No clock: times are given."""

from __future__ import annotations

import pytest

from edgellm.engine.pacer import SIZES, STRETCH, Pacer


def walked(decode_s: float, fixed_s: float, per_token_s: float, steps: int = 300) -> tuple[Pacer, list[float]]:
    """A pacer after decode steps and a long prompt, with the times of the prompt's steps."""
    pacer, times = Pacer(512), []
    for _ in range(40):
        pacer.observe(decode_s, 0, 4)
    for _ in range(steps):
        n = pacer.budget(4)
        times.append(decode_s + fixed_s + n * per_token_s)
        pacer.observe(times[-1], n, 4)
    return pacer, times


@pytest.mark.parametrize("per_token_s", [0.00005, 0.0003, 0.001, 0.004])
@pytest.mark.parametrize("fixed_s", [0.0, 0.01])
def test_steps_with_prompt_tokens_stay_near_a_decode_step(fixed_s: float, per_token_s: float) -> None:
    pacer, times = walked(0.02, fixed_s, per_token_s)
    assert sorted(times)[int(0.99 * len(times))] <= 4 * 0.02
    # And the time that is allowed is used: one size larger would be too long.
    n = pacer.budget(4)
    larger = min(size for size in (*SIZES, 10**9) if size > n)
    assert n == 512 or 0.02 + fixed_s + larger * per_token_s > 0.7 * STRETCH * 0.02


def test_costs_that_rise_with_depth_are_followed() -> None:
    pacer, times = Pacer(512), []
    for _ in range(40):
        pacer.observe(0.013, 0, 4)
    done = 0
    while done < 6000:
        n = pacer.budget(4)
        done += n
        times.append(0.013 + n * (0.002 + done * 1.5e-6))
        pacer.observe(times[-1], n, 4)
    assert sorted(times)[int(0.99 * len(times))] <= 4 * 0.013


def test_prompts_always_advance() -> None:
    pacer, _ = walked(0.001, 0.0, 0.01)
    assert pacer.budget(4) == SIZES[0] > 0


def test_nobody_waiting_means_no_limit() -> None:
    pacer, _ = walked(0.02, 0.0, 0.001)
    assert pacer.budget(0) == 512


def test_a_single_late_step_changes_nothing() -> None:
    pacer, _ = walked(0.02, 0.0, 0.001)
    size = pacer.budget(4)
    for _ in range(10):
        pacer.observe(0.5, size, 4)
        pacer.observe(0.02 + size * 0.001, size, 4)
    assert pacer.budget(4) == size
