"""How many tokens to guess ahead: the depth with the best expected tokens per second, from measured times.

For a request whose guesses are accepted with probability p each, verifying k of them gives
1 + p + ... + p^k tokens on average. A step costs `draft step * deepest + step(rows)`, where rows are the sequences'
own tokens and all their guesses. Depths are raised one guess at a time, always the likeliest one, and the best rate
on the way wins. Depth 0 for all is plain decoding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.engine.step_times import Recent, StepTimes

__all__ = ["MAX_EXTRA_ROWS", "Acceptance", "DepthController", "Prospect"]

MARGIN = 1.03
"""A guess must promise this much more than plain decoding: measured times are noisy, and a tie is a loss."""
MAX_EXTRA_ROWS = 32
ROWS_TOGETHER = 8
"""Steps of several sequences have a multiple of this many rows: kernels compute rows by eights, and a backend may have
to prepare itself for each size."""
PROBE_SHARE = 0.01
"""Share of the time that may go into finding out whether guessing pays again."""
FIRST_REFRESH, REFRESH = 8, 64
"""Steps with guesses after which one without them measures again what plain decoding takes. It is done soon after
guesses have begun to pay, because plain steps may only have been disturbed, then half as often each time."""


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
        fade = 0.95
        self._right = fade * self._right + accepted
        self._wrong = fade * self._wrong + (accepted < drafted)


@dataclass(frozen=True)
class Prospect:
    """What guessing for one sequence may bring: acceptance of its next guess, guesses at most, and whether each one
    takes a pass of the draft model."""

    rate: float
    limit: int
    costs: bool


class DepthController:
    """Chooses depths, and accounts for what guessing won or lost against plain decoding. `context`: see StepTimes."""

    def __init__(self, most: int):
        self.most = most
        self.times = StepTimes()
        self.catch_up_s = Recent()
        """Seconds per prompt token of the draft's catching up."""
        self.probe_s = 0.0
        """Time lost to guesses made only to find out."""
        self.total_s = 0.0
        self.plain_s = 0.0
        """What plain decoding would have taken for the same tokens."""
        self.probing = False
        """Whether the last choice was made only to find out."""
        self._since_plain: Counter[int] = Counter()
        self._refresh: Counter[int] = Counter()

    def choose(self, prospects: Sequence[Prospect], context: int = 0) -> list[int]:
        """Depth per sequence, each at most its limit."""
        n = len(prospects)
        self.probing = False
        if self.times.plain(n) is None or not any(p.limit for p in prospects):
            return [0] * n
        best = self._best(prospects, context)
        if any(best):
            refresh = self._refresh[n] or FIRST_REFRESH
            if self._since_plain[n] < refresh:
                return best
            self._refresh[n] = min(2 * refresh, REFRESH)
            return [0] * n
        self._refresh[n] = FIRST_REFRESH
        i = max(range(n), key=lambda i: (prospects[i].limit > 0, prospects[i].rate))
        # Each probe comes after a plain step, so that what it lost is known.
        if not self._since_plain[n] and self.may_lose(self.probe_loss(n, prospects[i].costs)):
            self.probing = True
            best[i] = min(2, prospects[i].limit)
        return best

    def account(self, num_seqs: int, num_rows: int, num_tokens: int, seconds: float, context: int = 0) -> None:
        """A decode-only step, guessing included, gave `num_tokens`."""
        self._since_plain[num_seqs] = self._since_plain[num_seqs] + 1 if num_rows > num_seqs else 0
        plain = self.times.plain(num_seqs, context)
        if plain is None:
            return
        self.total_s += seconds
        self.plain_s += plain * num_tokens / num_seqs
        if self.probing:
            expected = self.times.step(num_seqs, num_seqs, context)
            self.probe_s += max(0.0, seconds - expected * num_tokens / num_seqs)

    def promise(self, prospect: Prospect, num_seqs: int = 1, context: int = 0) -> float:
        """Least expected seconds per token and sequence if all sequences had this prospect; inf without guesses."""
        draft = self.times.draft_step(num_seqs, context) if prospect.costs else 0.0
        tokens, likely, best = 1.0, 1.0, float("inf")
        for k in range(1, min(prospect.limit, self.most, max(1, MAX_EXTRA_ROWS // num_seqs)) + 1):
            likely *= prospect.rate
            tokens += likely
            best = min(best, (k * draft + self.times.step(num_seqs, num_seqs * (1 + k), context)) / tokens)
        return best

    def pays(self, behind: int, left: int, rate: float, num_seqs: int = 1, context: int = 0) -> bool:
        """Whether `left` tokens guessed at this acceptance win back what computing `behind` tokens by the draft costs,
        for each of the sequences."""
        if self.times.plain(num_seqs) is None:
            return False
        plain = self.times.step(num_seqs, num_seqs, context)
        gain = plain / MARGIN - self.promise(Prospect(rate, self.most, True), num_seqs, context)
        return left * gain > num_seqs * behind * self.catch_up_s.typical

    def may_lose(self, seconds: float) -> bool:
        """Whether that much more may go into finding out whether guessing pays."""
        return self.probe_s + seconds <= PROBE_SHARE * self.total_s

    def probe_loss(self, num_seqs: int, costs: bool) -> float:
        """Seconds lost to a probe whose guesses are all wrong."""
        more_rows = self.times.step(num_seqs, num_seqs + 2) - self.times.step(num_seqs, num_seqs)
        return max(0.0, more_rows) + (2 * self.times.draft_step() if costs else 0.0)

    @property
    def speedup(self) -> float | None:
        """Tokens per second against plain decoding in the same process; None before anything was decoded."""
        return self.plain_s / self.total_s if self.total_s else None

    def _best(self, prospects: Sequence[Prospect], context: int) -> list[int]:
        n = len(prospects)
        draft = self.times.draft_step(n, context)
        depths, likely = [0] * n, [p.rate for p in prospects]
        tokens, passes = float(n), 0
        best, best_rate = list(depths), MARGIN * n / self.times.step(n, n, context)
        for extra in range(1, MAX_EXTRA_ROWS + 1):
            open_ = [i for i, p in enumerate(prospects) if depths[i] < min(p.limit, self.most)]
            if not open_:
                break
            i = max(open_, key=likely.__getitem__)
            depths[i] += 1
            tokens += likely[i]
            likely[i] *= prospects[i].rate
            if prospects[i].costs:
                passes = max(passes, depths[i])
            seconds = draft * passes + self.times.step(n, n + extra, context)
            if tokens / seconds > best_rate and (n == 1 or (n + extra) % ROWS_TOGETHER == 0):
                best, best_rate = list(depths), tokens / seconds
            hope = sum(likely[j] / (1 - min(prospects[j].rate, 0.99)) for j in open_)
            if (tokens + hope) / seconds <= best_rate:
                break  # even if all further guesses came for nothing
        return best
