"""How many prompt tokens a step may carry while answers are running: chosen from measured step times."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["GRACE", "Pacer"]

STRETCH, PROMISE = 2.7, 3.8
"""A step with prompt tokens may take this many plain decode steps; the rest up to what is promised (4 at the 99th
percentile) is room for noise and for trying the next larger size."""

GRACE = 4
"""Answers with no more tokens than this have only just begun: they wait for prompts that came with them."""

SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Few different sizes, because a backend may keep one recorded step per size."""

PATIENCE = 16
"""Steps within the limit before the next larger size is tried; twice as many after one that took too long."""


class Pacer:
    """Walks up and down `SIZES` so that mixed steps stay within `STRETCH` times the recent decode step. No model of
    what a token costs: that depends on depth, batch and the backend's kernels."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self._decode_s: deque[float] = deque(maxlen=32)
        self._at = SIZES.index(16)
        self._good = self._late = 0

    def budget(self, num_settled: int) -> int:
        """Prompt tokens for the next step; `num_settled`: answers under way that have more than GRACE tokens. Without
        any, nobody is kept waiting and the step may be as large as it gets."""
        return min(SIZES[self._at], self.max_tokens) if num_settled else self.max_tokens

    def observe(self, seconds: float, num_prefill: int, num_settled: int) -> None:
        """One step's time and what it carried."""
        if not num_prefill:
            self._decode_s.append(seconds)
            return
        if not num_settled or not self._decode_s or num_prefill < 0.7 * SIZES[self._at]:
            return
        plain = median(self._decode_s)
        if seconds > STRETCH * plain:
            self._late += 1
            if self._late >= 2:  # one alone may be the machine's doing
                self._at = max(0, self._at - 1)
                self._good, self._late = -PATIENCE, 0
            return
        self._good, self._late = self._good + 1, 0
        larger = min(len(SIZES) - 1, self._at + 1)
        expected = plain + max(0.0, seconds - plain) * SIZES[larger] / SIZES[self._at]
        if expected <= STRETCH * plain or (self._good >= PATIENCE and expected <= PROMISE * plain):
            self._at, self._good = larger, 0
