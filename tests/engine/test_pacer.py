"""The chunk size follows measured times. No clock: times are given."""

from __future__ import annotations

import pytest

from edgellm.engine.pacer import SIZES, STRETCH, Pacer


def settled(decode_s: float, per_token_s: float, num_decoding: int = 4) -> tuple[Pacer, list[float]]:
    """A pacer after decode steps and a long prompt, with the times of the prompt's steps."""
    pacer, times = Pacer(512), []
    for _ in range(40):
        pacer.observe(decode_s, 0, num_decoding)
    pacer.observe(300 * per_token_s, 300, 0)
    for _ in range(50):
        n = pacer.budget(num_decoding)
        times.append(decode_s + n * per_token_s)
        pacer.observe(times[-1], n, num_decoding)
    return pacer, times


@pytest.mark.parametrize("per_token_s", [0.00005, 0.0003, 0.001])
def test_a_step_with_prompt_tokens_stays_near_a_decode_step(per_token_s: float) -> None:
    _, times = settled(0.02, per_token_s)
    assert max(times) <= 1.05 * STRETCH * 0.02
    assert times[-1] >= 0.02 + 0.6 * min((STRETCH - 1) * 0.02, 512 * per_token_s)


def test_prompts_always_advance() -> None:
    pacer, _ = settled(0.001, 0.01)
    assert pacer.budget(4) == SIZES[0]


def test_nobody_waiting_means_no_limit() -> None:
    pacer, _ = settled(0.02, 0.001)
    assert pacer.budget(0) == 512


def test_noise_does_not_change_the_size() -> None:
    pacer, _ = settled(0.02, 0.0005)
    size, seen = pacer.budget(4), set()
    for i in range(40):
        seen.add(pacer.budget(4))
        pacer.observe(0.02 + size * 0.0005 * (1 + 0.1 * (-1) ** i), size, 4)
    assert len(seen) <= 2
