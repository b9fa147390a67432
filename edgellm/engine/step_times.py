"""What steps take, from recent ones, by what they computed, seen at the context they are asked for."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["Recent", "StepTimes"]

UNKNOWN_ROW = 0.15
"""Cost of one more row, in plain steps, before it has been measured."""


class Recent:
    """The last few values: their median, and what the next one is expected to be: the median, or the last one if it is
    less. Whatever disturbs a step makes it slower, so a quick one says that the disturbance is over. Kept as values
    come because they are asked for far more often."""

    def __init__(self, length: int = 9) -> None:
        self._values: deque[float] = deque(maxlen=length)
        self.typical = self.expected = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self._values.append(value)
        self.typical = median(self._values)
        self.expected = min(self.typical, value)


class StepTimes:
    """Expected seconds of decode-only steps by (sequences, rows), and of the draft's passes by sequences. `context` is
    the sum of the sequences' lengths: what their cached rows cost is taken off before a time is kept and put on again
    when it is asked for, so that times from short contexts hold for long ones.

    The first step of a kind is not counted: a backend may compile or prepare itself in it."""

    def __init__(self) -> None:
        self.context_s = self.draft_context_s = 0.0
        """Seconds that one token of context adds to a step of the target and to a pass of the draft."""
        self._seen: set[tuple[str, int, int]] = set()
        self._steps: dict[int, dict[int, Recent]] = {}
        self._drafts: dict[int, Recent] = {}

    def observe(self, num_seqs: int, num_rows: int, seconds: float, context: int = 0) -> bool:
        """One step without prompt tokens, guessing not included. False: the first of its kind, not counted."""
        if self._is_new(("target", num_seqs, num_rows)):
            return False
        self.set(num_seqs, num_rows, max(seconds - self.context_s * context, 0.1 * seconds))
        return True

    def set(self, num_seqs: int, num_rows: int, seconds: float) -> None:
        """A time measured on its own, warm, without context."""
        self._seen.add(("target", num_seqs, num_rows))
        self._steps.setdefault(num_seqs, {}).setdefault(num_rows, Recent()).add(seconds)

    def observe_draft(self, num_seqs: int, num_rows: int, seconds: float, context: int = 0) -> bool:
        """One pass of the draft, for one guess of each sequence. False as for `observe`."""
        if self._is_new(("draft", num_seqs, num_rows)):
            return False
        own = max(seconds - self.draft_context_s * context, 0.1 * seconds)
        self._drafts.setdefault(num_seqs, Recent(33)).add(own)
        return True

    def set_draft(self, seconds: float) -> None:
        """A pass of the draft for one sequence measured on its own, warm, without context."""
        self._seen.add(("draft", 1, 1))
        self._drafts.setdefault(1, Recent(33)).add(seconds)

    def plain(self, num_seqs: int, context: int = 0) -> float | None:
        """Typical seconds of a step without guesses, to account by; None before one was seen."""
        times = self._steps.get(num_seqs, {}).get(num_seqs)
        return times.typical + self.context_s * context if times else None

    def step(self, num_seqs: int, num_rows: int, context: int = 0) -> float:
        """Seconds of a step with that many rows: measured, or between and beyond what was measured."""
        return self._own(num_seqs, num_rows) + self.context_s * context

    def draft_step(self, num_seqs: int = 1, context: int = 0) -> float:
        """Seconds of one pass of the draft, by the nearest smaller batch that was seen; 0 before one was seen."""
        known = [n for n in self._drafts if n <= num_seqs] or sorted(self._drafts)[:1]
        return self._drafts[max(known)].expected + self.draft_context_s * context if known else 0.0

    def _is_new(self, kind: tuple[str, int, int]) -> bool:
        new = kind not in self._seen
        self._seen.add(kind)
        return new

    def _own(self, num_seqs: int, num_rows: int) -> float:
        known = self._steps.get(num_seqs, {})
        if num_rows in known:
            return known[num_rows].expected
        below = max((r for r in known if r < num_rows), default=None)
        above = min((r for r in known if r > num_rows), default=None)
        if below is None:
            return 0.0
        if above is not None:
            share = (num_rows - below) / (above - below)
            return known[below].expected * (1 - share) + known[above].expected * share
        if num_seqs > 1 and len(self._steps.get(1, {})) > 1:
            # More rows than were seen with so many sequences: they add what they add for one.
            return known[below].expected + max(0.0, self._own(1, num_rows) - self._own(1, below))
        return known[below].expected + self._row_cost(num_seqs) * (num_rows - below)

    def _row_cost(self, num_seqs: int) -> float:
        """Seconds of one more row beyond all that were seen."""
        known = self._steps[num_seqs]
        if len(known) < 2:
            return UNKNOWN_ROW * min(recent.expected for recent in known.values()) / num_seqs
        few, most = sorted(known)[-2:]
        return max(0.0, (known[most].expected - known[few].expected) / (most - few))
