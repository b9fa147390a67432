"""Equality of two answers of one model, as far as float32 sums in another order can be equal. On a Mac prompts multiply
in half on the GPU, so there everything may differ by more."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from edgellm.engine.output import Completion

__all__ = ["TOLERANCE", "assert_close"]

TOLERANCE = 5e-2 if mx.metal.is_available() else 2e-3
"""Of logits and logprobs."""
MARGIN = 5 * TOLERANCE
"""Between the best two logprobs; a smaller one may go either way, and what follows is then another text."""


def assert_close(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Greedy answers with `logprobs=2`: the same ids up to the first near tie, and the same logprobs."""
    compared = 0
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.logprobs is not None and b.logprobs is not None
        assert len(a.ids) == len(b.ids), f"request {i}"
        for step, (x, y) in enumerate(zip(a.logprobs, b.logprobs, strict=True)):
            best = sorted((other.logprob for other in y.top), reverse=True)
            if x.id != y.id:
                assert best[0] - best[1] <= MARGIN, f"request {i}, step {step}: {x} and {y}"
                break
            assert abs(x.logprob - y.logprob) < TOLERANCE, f"request {i}, step {step}: {x.logprob} and {y.logprob}"
            compared += 1
    assert compared > sum(len(b.ids) for b in expected) // 2, "near ties everywhere: nothing was compared"
