"""A tape that runs in parts, as long each time as its caller has time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import Batch
from edgellm.backends.cpu.tape import Tape
from edgellm.backends.cpu.team import Team

__all__ = ["CPUPass", "OpTimes"]

SHARE = 0.6
"""Part of the time left that is given away in one go. What disturbs that part makes the next one shorter."""
PROBE = 64
"""A tape that was never timed begins with 1 / PROBE of its ops."""
DEARER = 1.25
"""Ops are not taken to have become dearer by more than this at once: one that was disturbed says little."""


class OpTimes:
    """Seconds that each op of a tape is expected to take, learned from runs of several: ops of one run are scaled
    alike, so that runs with other ends tell them apart. Plain lists: where weights have just gone through the caches,
    numpy takes longer for a call than Python for a hundred additions."""

    def __init__(self, n_ops: int, like: OpTimes | None = None):
        """`like`: of another tape of the same model, whose ops are the same but for the last ones."""
        known: list[float] = like._seconds[:n_ops] if like else []
        self._seconds: list[float] = known + [0.0] * (n_ops - len(known))
        self._typical: float = like._typical if like else 0.0
        """Of an op that was not timed yet."""
        self._n_tokens: int = like._n_tokens if like else 0
        self._slowness: tuple[float, float] = (1.0, 1.0)
        """By how much the last two runs took longer than expected."""

    def scale(self, n_tokens: int) -> None:
        """From now on for batches of so many rows."""
        if self._n_tokens and n_tokens != self._n_tokens:
            ratio = n_tokens / self._n_tokens
            self._seconds, self._typical = [s * ratio for s in self._seconds], self._typical * ratio
        self._n_tokens = n_tokens

    def reach(self, first: int, seconds: float) -> int:
        """The op up to which (not included) a run from `first` on takes no longer than that. Where the last two runs
        were both slower than expected the machine is: its other guests come and go for tenths of a second, in which
        few ops are met twice."""
        if not self._typical:
            return first + len(self._seconds) // PROBE
        seconds /= max(1.0, min(self._slowness))
        op = first
        while op < len(self._seconds) and seconds >= (expected := self._seconds[op] or self._typical):
            seconds -= expected
            op += 1
        return op

    def learn(self, first: int, last: int, seconds: float) -> None:
        """Ops first .. last - 1 took that long together."""
        part, mean = self._seconds[first:last], seconds / (last - first)
        timed = all(part)
        self._typical = self._typical or mean
        expected = [s or self._typical for s in part]
        ratio = seconds / sum(expected)
        self._slowness = self._slowness[1], ratio
        self._seconds[first:last] = [s * (min(ratio, DEARER) if timed else ratio) for s in expected]


class CPUPass:
    """A batch on a tape of its own memory, see `backends.base.Pass`."""

    def __init__(self, team: Team, tape: Tape, batch: Batch, before: OpTimes | None = None):
        """`before`: times of the pass before this one, from which a new tape starts."""
        self._team, self._tape, self._next = team, tape, 0
        times: Any = tape.shared.setdefault("op times", OpTimes(len(tape.rows), before))
        self.times: OpTimes = times
        times.scale(batch.n_tokens)
        team.load(tape, batch)

    def advance(self, seconds: float) -> bool:
        first, n_ops = self._next, self._tape.n_ops
        end = time.perf_counter() + seconds
        while self._next < n_ops:
            now = time.perf_counter()
            last = self.times.reach(self._next, SHARE * (end - now))
            if last == self._next and (last == first or self.times.reach(last, end - now) > last):
                last += 1  # one op that is most of what is left, or at least one
            if last == self._next:
                return False
            last = min(last, n_ops)
            self._team.run_part(self._tape, self._next, last)
            self.times.learn(self._next, last, time.perf_counter() - now)
            self._next = last
        return True

    def result(self) -> npt.NDArray[np.float32]:
        return self._tape.output.copy()
