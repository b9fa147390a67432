"""Speculative decoding: guesses for the tokens to come, verified by the target in the same step as its own token.

Guesses never change an answer, only its speed: `Answer.accept` draws every token from the target's distribution with
the request's own random numbers and keeps a guess only where it is equal. The draft model is given those numbers, too
(common random numbers), so sampled answers are guessed nearly as well as greedy ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from edgellm.engine.answer import Answer
from edgellm.engine.depth import Acceptance, DepthController
from edgellm.engine.draft import DraftModel, time_rows
from edgellm.engine.kv_cache import KVCache
from edgellm.engine.lookup import PromptLookup
from edgellm.engine.model_runner import Runner

__all__ = ["DEPTH", "Speculator"]

DEPTH = 7
"""Guesses at most: with the target's own token they fill the eight rows of the few-rows kernels."""
MODEL_PRIOR, LOOKUP_PRIOR = 0.7, 0.5
LONG_GUESS = 8
MEASURE_S = 2.0
"""Seconds after which no further measurement is begun at load."""

USUAL_ANSWER = 200
"""Tokens an answer without a limit is taken to have when the draft's catching up is weighed."""


class Speculator:
    """Sets `draft_ids` of decoding requests before a step and learns from what the step accepted."""

    def __init__(self, ctx: int, lookup: PromptLookup | None, model: DraftModel | None, most: int = DEPTH):
        self.ctx = ctx
        self.lookup = lookup
        self.model = model
        self.controller = DepthController(most)
        self.totals: Counter[str] = Counter()
        self._prior = {"model": Acceptance(MODEL_PRIOR), "lookup": Acceptance(LOOKUP_PRIOR)}
        self._rates: dict[tuple[int, str], Acceptance] = {}
        self._sources: dict[int, str] = {}
        self._spent = 0.0
        self._probing = False

    def measure(self, runner: Runner, kv: KVCache) -> None:
        """Time target and draft before the first request, so that the first choice is no guess. Takes about ten
        steps of the target, fewer where they are slow; `runner` and `kv` are the target's, idle."""
        began = time.perf_counter()
        for rows in (1, self.controller.most + 1, 4, 2):
            if time.perf_counter() - began < MEASURE_S and (seconds := time_rows(runner, kv, rows)) > 0:
                self.controller.times.set(1, rows, seconds)
        if self.model is not None:
            step, token = self.model.measure()
            self.controller.times.observe_draft(step)
            self.controller.catch_up_s.append(token)

    def propose(self, answers: Sequence[Answer]) -> None:
        """Guess for requests that are one token behind; nothing else is scheduled in this step."""
        began = time.perf_counter()
        self._sources, self._probing = {}, False
        looked_up = {a: self._look_up(a) for a in answers}
        sources = [self._source(a, looked_up[a]) for a in answers]
        rates = [self._rate(a, s).rate if s else 0.0 for a, s in zip(answers, sources, strict=True)]
        limits = [self._limit(a, s, looked_up[a]) for a, s in zip(answers, sources, strict=True)]
        depths = self.controller.choose(rates, limits, "model" in sources)
        guessed: list[tuple[Answer, int]] = []
        for answer, source, depth in zip(answers, sources, depths, strict=True):
            if depth and source:
                self._sources[answer.request.request_id] = source
                if source == "lookup":
                    answer.request.draft_ids = looked_up[answer][:depth]
                else:
                    guessed.append((answer, depth))
        if guessed and self.model is not None:
            for (answer, _), ids in zip(guessed, self.model.propose(guessed), strict=True):
                answer.request.draft_ids = ids
            for seconds in self.model.pass_s:
                self.controller.times.observe_draft(seconds)
        self._probing = self.controller.probing
        self._spent = time.perf_counter() - began

    def observe(self, results: Sequence[tuple[Answer, int, int]], seconds: float) -> None:
        """A decode-only step took `seconds`; `results`: (answer, drafted, new tokens) of each sequence."""
        num_rows = len(results) + sum(drafted for _, drafted, _ in results)
        self.controller.times.observe(len(results), num_rows, seconds)
        tokens = 0
        for answer, drafted, new in results:
            tokens += new
            source = self._sources.get(answer.request.request_id)
            if drafted and source:
                accepted = min(new - 1, drafted)
                self._rate(answer, source).observe(drafted, accepted)
                self._prior[source].observe(drafted, accepted)
                self.totals["drafted"] += drafted
                self.totals["accepted"] += accepted
        self.controller.observe(len(results), tokens, seconds + self._spent, self._probing)

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        for part in (self.lookup, self.model):
            if part is not None:
                part.forget(request_id)
        for source in self._prior:
            self._rates.pop((request_id, source), None)

    def snapshot(self) -> dict[str, Any]:
        """Totals for `stats`."""
        drafted, accepted = self.totals["drafted"], self.totals["accepted"]
        return {
            "drafted": drafted,
            "accepted": accepted,
            "acceptance": accepted / drafted if drafted else None,
            "speedup": self.controller.speedup,
            "probe_share": self.controller.probe_s / self.controller.total_s if self.controller.total_s else 0.0,
            "draft_step_s": self.controller.times.draft_step,
        }

    def close(self) -> None:
        """Give back the draft model."""
        if self.model is not None:
            self.model.close()

    def _look_up(self, answer: Answer) -> list[int]:
        return self.lookup.propose(answer.request, LONG_GUESS) if self.lookup is not None else []

    def _source(self, answer: Answer, looked_up: list[int]) -> str | None:
        """Who guesses for a request: the text itself where it repeats, else the draft model once it has caught up.
        Nobody before the first token: it must not come later than without guesses."""
        if not answer.request.num_new_tokens:
            return None
        lookup_rate = self._rate(answer, "lookup").rate
        if self.model is None or not self._draft_ready(answer):
            return "lookup" if looked_up else None
        return "lookup" if looked_up and lookup_rate >= self._rate(answer, "model").rate else "model"

    def _draft_ready(self, answer: Answer) -> bool:
        """Whether the draft can guess for a request now. Catching up on its prompt goes in chunks, one per step, and
        only where the tokens still to come can pay for it."""
        assert self.model is not None
        request = answer.request
        if not self.model.room(request):
            return False
        behind = self.model.behind(request)
        if behind <= self.controller.most + 1:
            return True
        left = min(request.max_tokens - request.num_new_tokens, USUAL_ANSWER)
        if not self.controller.pays(behind, left, self._rate(answer, "model").rate):
            return False
        start = time.perf_counter()
        ready = self.model.catch_up(request)
        done = behind - self.model.behind(request)
        if done:
            self.controller.catch_up_s.append((time.perf_counter() - start) / done)
        return ready

    def _limit(self, answer: Answer, source: str | None, looked_up: list[int]) -> int:
        request = answer.request
        left = min(request.max_tokens - request.num_new_tokens - 1, self.ctx - request.num_tokens - 1)
        if source == "lookup":
            return max(0, min(left, len(looked_up)))
        if source == "model" and self.model is not None:
            return max(0, min(left, self.model.room(request)))
        return 0

    def _rate(self, answer: Answer, source: str) -> Acceptance:
        key = (answer.request.request_id, source)
        if key not in self._rates:
            self._rates[key] = Acceptance(self._prior[source].rate)
        return self._rates[key]
