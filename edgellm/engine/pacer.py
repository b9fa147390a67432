"""How many prompt tokens a step may carry while answers are running: chosen from measured step times."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["Pacer"]

STRETCH = 2.3
"""A step with prompt tokens may take this many plain decode steps. The promise is 4 at the 99th percentile; the rest
is room for what one prompt token costs more at the end of a long prompt, and for noise."""

UNMEASURED = 32
SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Few different sizes, and changed only for a reason: a backend may keep one recorded step per size."""


class Pacer:
    """Keeps a mixed step within `STRETCH` times the recent decode step."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self._decode_s: deque[float] = deque(maxlen=32)
        self._per_token_s: float | None = None
        self._last = SIZES[0]

    def budget(self, num_decoding: int) -> int:
        """Prompt tokens for the next step: everything when nobody waits for a token."""
        if not num_decoding:
            return self.max_tokens
        if not self._decode_s or self._per_token_s is None:
            return min(UNMEASURED, self.max_tokens)
        n = int((STRETCH - 1) * median(self._decode_s) / self._per_token_s)
        if not 0.75 * n <= self._last <= 1.1 * max(n, SIZES[0]):
            self._last = max((size for size in SIZES if size <= n), default=SIZES[0])
        return min(self._last, self.max_tokens)

    def observe(self, seconds: float, num_prefill: int, num_decoding: int) -> None:
        """One step's time and what it carried."""
        if not num_prefill:
            self._decode_s.append(seconds)
            return
        base = median(self._decode_s) if num_decoding and self._decode_s else 0.0
        sample = max(seconds - base, seconds / 10) / num_prefill
        if num_prefill >= SIZES[0]:
            old = self._per_token_s
            self._per_token_s = sample if old is None else 0.7 * old + 0.3 * sample
