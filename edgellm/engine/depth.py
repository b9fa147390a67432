"""How many tokens to guess ahead: the depth with the best expected tokens per second, from measured times.

For a request whose guesses are accepted with probability p each, verifying k of them gives
1 + p + ... + p^k tokens on average. A step costs `draft step * deepest + step(rows)`, where rows are the sequences'
own tokens and all their guesses. Depths are raised one guess at a time, always the likeliest one, and the best rate
on the way wins. Depth 0 for all is plain decoding.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

__all__ = ["Acceptance", "DepthController", "StepTimes"]

MARGIN = 1.03
"""A guess must promise this much more than plain decoding: measured times are noisy, and a tie is a loss."""
MAX_EXTRA_ROWS = 32
PROBE_SHARE = 0.01
"""Share of the time that may go into finding out whether guessing pays again."""
UNKNOWN_ROW = 0.15
"""Cost of one more row, in plain steps, before it has been measured."""


class Acceptance:
    """How likely a guess is right, from what was verified lately. Starts at `prior` (worth two observations)."""

    def __init__(self, prior: float):
        self._right, self._wrong = 2 * prior, 2 * (1 - prior)

    @property
    def rate(self) -> float:
        """Estimated probability that one more guess is accepted, given those before it were."""
        return self._right / (self._right + self._wrong)

    def observe(self, drafted: int, accepted: int) -> None:
        """One verification: the guesses after the first wrong one say nothing."""
        fade = 0.9
        self._right = fade * self._right + accepted
        self._wrong = fade * self._wrong + (accepted < drafted)


class StepTimes:
    """Median times of recent decode-only steps by (sequences, rows), and of draft steps. The first step of a kind is
    not counted: a backend may prepare itself in it."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()
        self._steps: dict[int, dict[int, deque[float]]] = defaultdict(lambda: defaultdict(lambda: deque(maxlen=9)))
        self._drafts: deque[float] = deque(maxlen=33)

    def observe(self, num_seqs: int, num_rows: int, seconds: float) -> None:
        """One step without prompt tokens, guessing not included."""
        if (num_seqs, num_rows) in self._seen:
            self._steps[num_seqs][num_rows].append(seconds)
        self._seen.add((num_seqs, num_rows))

    def set(self, num_seqs: int, num_rows: int, seconds: float) -> None:
        """A time measured on its own, warm."""
        self._seen.add((num_seqs, num_rows))
        self._steps[num_seqs][num_rows].append(seconds)

    def observe_draft(self, seconds: float) -> None:
        """One pass of the draft, for one guess of each sequence."""
        self._drafts.append(seconds)

    def plain(self, num_seqs: int) -> float | None:
        """Seconds of a step without guesses; None before one was seen."""
        times = self._steps[num_seqs].get(num_seqs)
        return median(times) if times else None

    def step(self, num_seqs: int, num_rows: int) -> float:
        """Seconds of a step with that many rows: measured, or between and beyond what was measured."""
        known = {rows: median(times) for rows, times in self._steps[num_seqs].items() if times}
        if num_rows in known:
            return known[num_rows]
        plain = known.get(num_seqs, 0.0)
        below = max((r for r in known if r < num_rows), default=num_seqs)
        above = min((r for r in known if r > num_rows), default=None)
        if above is not None:
            share = (num_rows - below) / (above - below)
            return known.get(below, plain) * (1 - share) + known[above] * share
        return known.get(below, plain) + self._row_cost(plain / num_seqs) * (num_rows - below)

    def _row_cost(self, plain: float) -> float:
        """Seconds of one more row, by what a single sequence's steps of more rows took."""
        known = {rows: median(times) for rows, times in self._steps[1].items() if times}
        if len(known) < 2:
            return UNKNOWN_ROW * plain
        few, most = sorted(known)[-2:]
        return max(0.0, (known[most] - known[few]) / (most - few))

    @property
    def draft_step(self) -> float:
        """Seconds of one pass of the draft; 0 before one was seen."""
        return median(self._drafts) if self._drafts else 0.0


class DepthController:
    """Chooses depths, and accounts for what guessing won or lost against plain decoding."""

    def __init__(self, most: int):
        self.most = most
        self.times = StepTimes()
        self.probe_s = 0.0
        """Time lost to guesses made only to find out."""
        self.total_s = 0.0
        self.plain_s = 0.0
        """What plain decoding would have taken for the same tokens."""
        self.probing = False
        """Whether the last choice was made only to find out."""
        self.catch_up_s: deque[float] = deque(maxlen=9)
        """Seconds per prompt token of the draft's catching up."""

    def choose(self, rates: Sequence[float], limits: Sequence[int], draft_costs: bool) -> list[int]:
        """Depth per sequence, each at most its limit. `rates`: acceptance of each sequence's next guess."""
        n = len(rates)
        plain = self.times.plain(n)
        zero = [0] * n
        self.probing = False
        if plain is None:
            return zero
        depths, likely = list(zero), list(rates)
        tokens, best, best_rate = float(n), zero, MARGIN * n / plain
        step = self.times.draft_step if draft_costs else 0.0
        for extra in range(1, MAX_EXTRA_ROWS + 1):
            open_ = [i for i in range(n) if depths[i] < min(limits[i], self.most)]
            if not open_:
                break
            i = max(open_, key=lambda i: likely[i])
            depths[i] += 1
            tokens += likely[i]
            likely[i] *= rates[i]
            rate = tokens / (step * max(depths) + self.times.step(n, n + extra))
            if rate > best_rate:
                best, best_rate = list(depths), rate
        if best == zero and any(limits) and self._may_probe(n):
            self.probing = True
            i = max(range(n), key=lambda i: (limits[i] > 0, rates[i]))
            best = [min(2, limits[i]) if j == i else 0 for j in range(n)]
        return best

    def observe(self, num_seqs: int, num_tokens: int, seconds: float, expected_worse: bool) -> None:
        """A decode-only step, guessing included, gave `num_tokens`. `expected_worse`: it was a probe."""
        plain = self.times.plain(num_seqs)
        if plain is None:
            return
        self.total_s += seconds
        self.plain_s += plain * num_tokens / num_seqs
        if expected_worse:
            self.probe_s += max(0.0, seconds - plain * num_tokens / num_seqs)

    def pays(self, behind: int, left: int, rate: float) -> bool:
        """Whether `left` tokens guessed at this acceptance win back what computing `behind` prompt tokens costs."""
        plain = self.times.plain(1)
        if plain is None:
            return False
        draft = self.times.draft_step or plain / 4
        per_token = median(self.catch_up_s) if self.catch_up_s else draft / 4
        best = max(
            (1 - rate ** (k + 1)) / (1 - min(rate, 0.999)) / (k * draft + self.times.step(1, 1 + k))
            for k in range(1, self.most + 1)
        )
        return left * (plain - 1 / best) > behind * per_token

    @property
    def speedup(self) -> float | None:
        """Tokens per second against plain decoding in the same process; None before anything was decoded."""
        return self.plain_s / self.total_s if self.total_s else None

    def _may_probe(self, num_seqs: int) -> bool:
        """Whether one more probe, if all its guesses are wrong, stays within the share."""
        plain = self.times.plain(num_seqs) or 0.0
        loss = self.times.step(num_seqs, num_seqs + 2) - plain + 2 * self.times.draft_step
        return self.probe_s + loss <= PROBE_SHARE * self.total_s
