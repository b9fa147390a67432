"""Long prompts beside running answers, a slice of a pass in each step (backends that can pause a pass).

A pass computes many prompt tokens at once, so weights, K and V are read once for all of them; it goes on over several
steps, as long in each as its answers can wait. What a slice may take is known to the millisecond, for decoding comes
first in a step: a step whose decoding was disturbed has a shorter slice.
"""

from __future__ import annotations

import time
from collections import deque
from math import inf
from statistics import median

from edgellm.engine.model_runner import Rows, Runner, RunnerPass
from edgellm.engine.pacer import REMEMBER_EVERY, Budget
from edgellm.engine.request import Request, Task
from edgellm.engine.scheduler import Schedule
from edgellm.engine.step_times import Recent
from edgellm.memory import PASS_TOKENS

__all__ = ["LONG", "STRETCH", "Slices", "take_prompts"]

STRETCH = 3.3
"""A step with a slice may take this many plain decode steps; what is promised is 4 at the 99th percentile. Less leaves
no more room in the end: prompts take longer, answers grow meanwhile, and their own decoding fills the steps."""

LONG = 512
"""Prompts up to so many tokens share the steps of decoding instead (pacer.py): little lies before theirs that would be
read again, and weights that both need are read once. 64 answers to short prompts lose 10 to 20% in passes."""

STEPS = 8
"""Steps that a pass should take: more tokens read K and V more seldom, but then one op is more of a slice."""

FEWEST = 32
"""Tokens of a pass at least, where the prompt has them, and of the first one, before any was timed."""

SCANT = 0.25
"""Usual steps that are too few for a slice, but not twice in a row: one op may take longer."""

LEAST = 0.5
"""Usual steps that a slice may take at least, should decoding have become dearer meanwhile: prompts still advance."""


def take_prompts(schedule: Schedule) -> Schedule:
    """Take the prompt tokens out of a schedule, for a pass of their own. A pass has either hidden states or logits,
    those of its first item; what wants the others is left for a later step."""
    prompts = [item for item in schedule.items if item.request.num_uncomputed_tokens > 1]
    schedule.items = [item for item in schedule.items if item not in prompts]
    schedule.num_prefill_tokens = schedule.prefill_depth = 0
    kinds = [item.request.task is Task.HIDDEN for item in prompts]
    return Schedule([item for item, kind in zip(prompts, kinds, strict=True) if kind == kinds[0]])


class Slices:
    """The one pass under way, if any, and how it is paced."""

    def __init__(self, runner: Runner, max_tokens: int):
        self._runner = runner
        self._most = min(PASS_TOKENS, max_tokens)
        self._tokens = min(FEWEST, self._most)
        self._all_usual: dict[int, deque[float]] = {}
        """Seconds of steps that only decode, by about how many answers: what they are used to. Of steps with slices one
        in REMEMBER_EVERY."""
        self._usual: deque[float] = deque()
        """Of them those with as many answers as now."""
        self._now = Recent(9)
        """Seconds of decoding, lately."""
        self._steps = 0
        self._pass: RunnerPass | None = None
        self._spent = self._granted = 0.0
        self._sat_out = False
        """Whether the pass was left alone in the last step that had time for it."""
        self.schedule: Schedule | None = None
        """What the pass under way computes."""

    def budget(self) -> Budget:
        """For the next step's schedule: the tokens of a new pass, none while one is under way."""
        return Budget(0 if self.schedule else self._tokens)

    def begin(self, schedule: Schedule) -> None:
        """Start the pass over these prompt tokens; raises what the model raises."""
        self._pass = self._runner.begin(schedule)
        self._spent = self._granted = 0.0
        self.schedule = schedule
        for item in schedule.items:
            item.request.computing = True

    def observe(self, seconds: float, num_answers: int, alone: bool) -> None:
        """A step's decoding took that long; `alone`: no prompt waits for the rest of the step."""
        self._usual = self._all_usual.setdefault(num_answers.bit_length(), deque(maxlen=256))
        self._now.add(seconds)
        self._steps += 1
        if alone or not self._usual or self._steps % REMEMBER_EVERY == 0:
            self._usual.append(seconds)

    def advance(self, elapsed: float, waited_for: bool) -> list[Rows] | None:
        """Go on with the pass, in a step that has taken `elapsed` seconds already; to its end unless the step is
        `waited_for`. The rows of its items when it is done; raises what the model raises."""
        assert self._pass is not None
        usual = median(self._usual) if waited_for and self._usual else 0.0
        seconds = self._allowance() - elapsed if usual else inf
        if seconds <= 0 or (seconds < SCANT * usual and not self._sat_out):
            self._sat_out |= seconds > 0
            return None
        self._sat_out = False
        began = time.perf_counter()
        done = self._pass.advance(seconds)
        self._spent += time.perf_counter() - began
        self._granted = max(self._granted, seconds)
        if not done:
            return None
        rows = self._pass.rows()
        self._adapt()
        self.drop()
        return rows

    def has_time(self, since: float) -> bool:
        """Whether a step that began at `since` has room for a part of another pass that is worth its beginning."""
        return bool(self._usual) and self.time_left(since) > LEAST * median(self._usual)

    def time_left(self, since: float) -> float:
        """Seconds that a step which began at `since` may still take."""
        return self._allowance() - (time.perf_counter() - since) if self._usual else inf

    def drop(self) -> None:
        """Forget the pass under way; its tokens are computed again, unless they were done."""
        for item in self.schedule.items if self.schedule else ():
            item.request.computing = False
        self._pass = self.schedule = None

    def drop_with(self, request: Request) -> None:
        """Forget the pass under way if it computes this request: its blocks are about to go to others."""
        if request.computing:
            self.drop()

    def _allowance(self) -> float:
        """Seconds that a step with a slice may take."""
        usual = median(self._usual)
        return max(STRETCH * usual, self._now.expected + LEAST * usual)

    def _adapt(self) -> None:
        """Choose the tokens of the next pass by what this one took."""
        if self.schedule is None or self._granted == inf or not self._spent:
            return
        n = self.schedule.num_tokens * STEPS * self._granted / self._spent
        tokens = FEWEST
        while 2 * tokens <= min(n, 2 * self._tokens):
            tokens *= 2
        self._tokens = min(tokens, self._most)
