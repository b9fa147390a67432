"""How many prompt tokens a step may carry while answers are running: chosen from measured step times. For backends that
compute a pass at once, and for short prompts; where one can be paused, long ones have passes of their own (slices.py).

What a prompt token costs beyond a step's decoding is learned by depth (how many tokens lie before it): attention makes
deep ones dearer, by how much depends on the model, its windows and the machine.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from statistics import median

from edgellm.engine.request import Request
from edgellm.engine.step_times import Recent

__all__ = ["GRACE", "SIZES", "Budget", "Pacer"]

STRETCH = 3.4
"""A step with prompt tokens may take this many plain decode steps; what is promised is 4 at the 99th percentile. Less
would not make late steps rarer: prompts take longer then, and the answers grow and get dearer meanwhile."""

LEAST = 0.5
"""Decode steps that prompt tokens may take at least, should decoding have become dearer meanwhile."""

SHORT = 0.2
"""Prompts may sit a step out if something else (new memory) has taken more than this part of a decode step already."""

GRACE = 4
"""Answers with no more tokens than this have only just begun: they wait for prompts that came with them."""

SIZES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 448, 512)
"""Numbers of prompt tokens that a step may be given."""

FIRST = 16
"""Prompt tokens of the first step that is measured; the most may double with each step that goes well."""

REMEMBER_EVERY = 32
"""One step in so many goes without prompt tokens, so that what decoding alone takes is not forgotten."""

SPAN = 512
"""Tokens of depth that are taken to cost the same."""


def _weight(n: int) -> float:
    """What a chunk counts as, in tokens of a larger one: a few must read all that lies before them, too."""
    return max(float(n), (n + 4) / 2)


@dataclass
class Budget:
    """What one step may spend on prompts: tokens, and seconds beyond those of its decoding."""

    tokens: int
    seconds: float = inf
    cost: Callable[[float], float] = lambda depth: 0.0
    """Seconds of a prompt token with so many before it."""
    least: int = SIZES[0]
    """Tokens of a chunk for which the seconds do not suffice."""

    def take(self, request: Request) -> int:
        """How many of a request's prompt tokens go into this step."""
        wanted = request.num_uncomputed_tokens
        if request.whole_prompt:
            self.tokens -= wanted
            return wanted
        return self.chunk(request.num_computed_tokens, min(wanted, request.max_chunk))

    def chunk(self, depth: int, wanted: int) -> int:
        """How many of `wanted` prompt tokens with `depth` others before them go into this step."""
        n = min(wanted, self.tokens)
        if self._seconds(n, depth) > self.seconds:
            n = min(n, max((size for size in SIZES if self._seconds(size, depth) <= self.seconds), default=self.least))
            self.tokens = n  # what is left is too little for another prompt
        self.tokens -= n
        self.seconds -= self._seconds(n, depth)
        return n

    def _seconds(self, n: int, depth: int) -> float:
        return _weight(n) * self.cost(depth + n / 2) if n else 0.0


class Pacer:
    """Learns what decoding and prompt tokens take, and keeps steps with both within `STRETCH` decode steps."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self._most = min(FIRST, max_tokens)
        self._decode_s: deque[float] = deque(maxlen=256)
        """Seconds of decoding alone: what answers are used to. Of steps beside prompts only those of REMEMBER_EVERY."""
        self._now = Recent(3)
        """Seconds of decoding alone, lately."""
        self._sits_out = False
        self.spent = 0.0
        """Seconds that the next step has taken already, for something else."""
        self._costs: dict[int, deque[tuple[float, float]]] = {}
        """Depth and seconds of recent prompt tokens, by depth in SPANs."""
        self._typical: dict[int, tuple[float, float]] = {}
        """Of each span, typical depth and seconds."""
        self._line: list[tuple[float, float]] = []
        """The same, in order."""
        self._asked = 0

    def budget(self, num_settled: int) -> Budget:
        """For the next step; `num_settled`: answers under way that have more than GRACE tokens. Without any, nobody is
        kept waiting and the step may be as large as it gets."""
        self._sits_out = False
        if not num_settled:
            return Budget(self.max_tokens)
        self._asked += 1
        if self._asked >= (REMEMBER_EVERY if self._decode_s else 2):
            self._asked = 0
            return Budget(0)
        if not self._decode_s:
            return Budget(self._most)
        now = self._now.expected
        left = STRETCH * median(self._decode_s) - now - self.spent
        if self.spent > SHORT * now:
            self._sits_out = True
            return Budget(self._most, left, self.cost, least=0)
        return Budget(self._most, max(left, LEAST * now), self.cost)

    def observe(self, seconds: float, num_prefill: int, depth: int, num_settled: int) -> None:
        """One step's time and what it carried. `depth`: tokens before its prompt tokens, the mean over them."""
        if not num_prefill:
            self._now.add(seconds)
            if not self._sits_out:
                self._decode_s.append(seconds)
        elif num_settled and self._decode_s:
            if num_prefill >= self._most and seconds <= STRETCH * median(self._decode_s):
                self._most = min(2 * self._most, self.max_tokens)
            beyond = seconds - self._now.expected
            if beyond > 0:
                self._learn(depth + num_prefill / 2, beyond / _weight(num_prefill))
            else:  # decoding was disturbed when it was measured
                self._asked = REMEMBER_EVERY

    def cost(self, depth: float) -> float:
        """Seconds of a prompt token, on the line through what is typical in each span; beyond its ends not less."""
        if len(self._line) < 2 or depth <= self._line[0][0]:
            return self._line[0][1] if self._line else 0.0
        at = min(bisect(self._line, (depth, 0.0)), len(self._line) - 1)
        (x0, y0), (x1, y1) = self._line[at - 1 : at + 1]
        y = y0 + (y1 - y0) * (depth - x0) / (x1 - x0)
        return max(y, y1) if depth > x1 else y

    def _learn(self, depth: float, seconds: float) -> None:
        span = int(depth) // SPAN
        if span not in self._costs and self._line:  # it has no others yet that would outvote a disturbed one
            seconds = min(seconds, 2 * self.cost(depth))
        costs = self._costs.setdefault(span, deque(maxlen=5))
        costs.append((depth, seconds))
        self._typical[span] = median(depth for depth, _ in costs), median(seconds for _, seconds in costs)
        self._line = [typical for _, typical in sorted(self._typical.items())]
