"""Speculative decoding: guesses for the tokens to come, verified by the target in the same step as its own token.

Guesses never change an answer, only its speed: `Answer.accept` draws every token from the target's distribution with
the request's own random numbers and keeps a guess only where it is equal. The draft model is given those numbers, too
(common random numbers), so sampled answers are guessed nearly as well as greedy ones.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.engine.answer import Answer
from edgellm.engine.depth import MAX_EXTRA_ROWS, Acceptance, DepthController, Prospect
from edgellm.engine.draft import DraftModel, time_rows
from edgellm.engine.kv_cache import KVCache
from edgellm.engine.lookup import PromptLookup
from edgellm.engine.model_runner import Runner
from edgellm.engine.tally import Tally

__all__ = ["DEPTH", "Speculator", "split_draft"]

log = logging.getLogger(__name__)

DEPTH = 7
"""Guesses at most: with the target's own token they fill the eight rows of the few-rows kernels."""
PRIORS = {"model": 0.7, "lookup, 4 tokens": 0.7, "lookup, 2 tokens": 0.4}
"""Acceptance that each source of guesses is taken to have before it was seen."""
LONG_GUESS = 8
MEASURE_S = 2.0
"""Seconds after which no further measurement is begun at load."""

LOOK_EVERY = 8
"""Steps between two looks at whether the draft should begin to catch up with a request (a look takes 0.05 ms)."""
USUAL_ANSWER = 200
"""Tokens an answer without a limit is taken to have when the draft's catching up is weighed."""


@dataclass(frozen=True)
class Offer:
    """Somebody who could guess for a request in this step: a source of `PRIORS`, and what lookup has found."""

    source: str
    prospect: Prospect
    ids: Sequence[int] = ()


NOBODY = Offer("", Prospect(0.0, 0, False))


class Speculator:
    """Sets `draft_ids` of decoding requests before a step and learns from what the step accepted.

    `context_share`, `draft_context_share`: bytes of cache per token over bytes of weights, of target and draft; they
    say how much longer a step takes per token of context."""

    def __init__(
        self,
        ctx: int,
        lookup: PromptLookup | None,
        model: DraftModel | None,
        most: int = DEPTH,
        context_share: float = 0.0,
        draft_context_share: float = 0.0,
    ):
        self.ctx = ctx
        self.lookup = lookup
        self.model = model
        self.controller = DepthController(most)
        self.tally = Tally()
        self._shares = context_share, draft_context_share
        self._prior = {source: Acceptance(rate) for source, rate in PRIORS.items()}
        self._rates: dict[tuple[int, str], Acceptance] = {}
        self._accounts: defaultdict[int, _Account] = defaultdict(_Account)
        self._sources: dict[int, str] = {}
        self._spent = 0.0
        self._steps = 0

    def measure(self, runner: Runner, kv: KVCache) -> None:
        """Time target and draft before the first request, so that the first choice is no guess. Takes about
        twenty steps of the target, fewer where they are slow; `runner` and `kv` are the target's, idle."""
        began, times = time.perf_counter(), self.controller.times
        for rows in (1, self.controller.most + 1, 4, 2, MAX_EXTRA_ROWS):
            if time.perf_counter() - began < MEASURE_S and (seconds := time_rows(runner, kv, rows, rows - 1)) > 0:
                times.set(1, rows, seconds)
        times.context_s = self._shares[0] * (times.plain(1) or 0.0)
        if self.model is not None:
            step, token = self.model.measure()
            if step and token:
                times.set_draft(step)
                times.draft_context_s = self._shares[1] * step
                self.controller.catch_up_s.add(token)

    def propose(self, answers: Sequence[Answer]) -> None:
        """Guess for requests that are one token behind; nothing else is scheduled in this step."""
        began = time.perf_counter()
        self._sources = {}
        context = sum(answer.request.num_tokens for answer in answers)
        all_offers = [self._offers(answer, len(answers), context) for answer in answers]
        ready = self._caught_up(answers, all_offers, context)
        offers = [
            next((offer for offer in some if offer.source != "model" or answer in ready), NOBODY)
            for answer, some in zip(answers, all_offers, strict=True)
        ]
        depths = self.controller.choose([offer.prospect for offer in offers], context)
        guessed: list[tuple[Answer, int]] = []
        for answer, offer, depth in zip(answers, offers, depths, strict=True):
            if depth:
                self._sources[answer.request.request_id] = offer.source
                if offer.source == "model":
                    guessed.append((answer, depth))
                else:
                    answer.request.draft_ids = list(offer.ids[:depth])
        if guessed and self.model is not None:
            for (answer, _), ids in zip(guessed, self.model.propose(guessed), strict=True):
                answer.request.draft_ids = ids
            self._spent -= self._learn_passes(self.model)
        self._spent += time.perf_counter() - began

    def observe(self, results: Sequence[tuple[Answer, int, int]], seconds: float) -> None:
        """A decode-only step took `seconds`; `results`: (answer, drafted, new tokens) of each sequence."""
        n, times = len(results), self.controller.times
        num_rows = n + sum(drafted for _, drafted, _ in results)
        context = sum(answer.request.num_tokens for answer, _, _ in results)
        if not times.observe(n, num_rows, seconds, context):
            seconds = min(seconds, times.step(n, num_rows, context) or seconds)
        seconds += self._spent
        plain = times.plain(n, context)
        for answer, drafted, new in results:
            request_id = answer.request.request_id
            source = self._sources.get(request_id)
            if drafted and source:
                accepted = min(new - 1, drafted)
                self._rate(request_id, source).observe(drafted, accepted)
                self._prior[source].observe(drafted, accepted)
                self.tally.count(drafted, accepted)
            if plain is not None:
                self._accounts[request_id].add(new * plain, seconds)
        self.controller.account(n, num_rows, sum(new for _, _, new in results), seconds, context)
        self._sources, self._spent = {}, 0.0

    def finished(self, answer: Answer) -> None:
        """The request has ended: its report is made, and what is kept for it given back."""
        request_id = answer.request.request_id
        answer.speculating, answer.speedup = True, self._accounts.pop(request_id, _Account()).speedup
        for part in (self.lookup, self.model):
            if part is not None:
                part.forget(request_id)
        for source in self._prior:
            self._rates.pop((request_id, source), None)
        log.info("request %d: guesses %s", request_id, answer.speculation())

    def snapshot(self) -> dict[str, Any]:
        """Totals for `stats`."""
        controller = self.controller
        return {
            **self.tally.report(),
            "speedup": controller.speedup,
            "probe_share": controller.probe_s / controller.total_s if controller.total_s else 0.0,
            "draft_step_s": controller.times.draft_step(),
        }

    def close(self) -> None:
        """Give back the draft model."""
        if self.model is not None:
            self.model.close()

    def _offers(self, answer: Answer, num_seqs: int, context: int) -> list[Offer]:
        """Who could guess, the most promising first: the text itself where it repeats costs nothing, the draft model a
        pass per guess. Nobody before the first token: it must not come later than without guesses."""
        request = answer.request
        left = min(request.max_tokens - request.num_new_tokens - 1, self.ctx - request.num_tokens - 1)
        offers: list[Offer] = []
        if not request.num_new_tokens or left <= 0:
            return offers
        if self.lookup is not None:
            ids, n = self.lookup.propose(request, LONG_GUESS)
            if ids:
                source = f"lookup, {n} tokens"
                rate = self._rate(request.request_id, source).rate
                offers.append(Offer(source, Prospect(rate, min(left, len(ids)), False), ids))
        if self.model is not None and (room := self.model.room(request)):
            rate = self._rate(request.request_id, "model").rate
            offers.append(Offer("model", Prospect(rate, min(left, room), True)))
        if len(offers) > 1:
            offers.sort(key=lambda offer: self.controller.promise(offer.prospect, num_seqs, context))
        return offers

    def _caught_up(
        self, answers: Sequence[Answer], offers: Sequence[Sequence[Offer]], context: int
    ) -> Container[Answer]:
        """Answers that the draft model is the best to guess for, and has caught up with. Catching up goes in chunks,
        one per step, and only where the tokens still to come can pay for it, or to find out (rarely)."""
        if self.model is None:
            return ()
        n, near = len(answers), self.controller.most + 1
        asked = [a for a, some in zip(answers, offers, strict=True) if some and some[0].source == "model"]
        behind = {answer: self.model.behind(answer.request) for answer in asked}
        far = {answer: tokens for answer, tokens in behind.items() if tokens > near}
        wanted, probing = [], 0.0
        self._steps += 1
        for answer, tokens in far.items():
            begun = tokens < answer.request.num_tokens
            if not begun and answer.request.num_new_tokens > 1 and self._steps % LOOK_EVERY:
                continue
            left = min(answer.request.max_tokens - answer.request.num_new_tokens, USUAL_ANSWER)
            rate = self._rate(answer.request.request_id, "model").rate
            loss = tokens * self.controller.catch_up_s.typical + self.controller.probe_loss(n, True)
            if self.controller.pays(tokens, left, rate, n, context):
                wanted.append(answer.request)
            elif not wanted and self.controller.may_lose(loss):
                wanted, probing = [answer.request], loss
                break
        if wanted:
            began = time.perf_counter()
            done = self.model.catch_up(wanted)
            seconds = time.perf_counter() - began
            if done:
                self.controller.catch_up_s.add(seconds / done)
            self.controller.probe_s += seconds if probing else 0.0
        return {answer for answer in asked if answer not in far or self.model.behind(answer.request) <= near}

    def _learn_passes(self, model: DraftModel) -> float:
        """Take in what the draft's passes took. Returns the seconds that passes of a new kind took beyond the usual:
        they may hold compiling, which no later pass will."""
        beyond, times = 0.0, self.controller.times
        for n, num_rows, seconds, context in model.passes:
            if not times.observe_draft(n, num_rows, seconds, context):
                beyond += max(0.0, seconds - (times.draft_step(n, context) or seconds))
        return beyond

    def _rate(self, request_id: int, source: str) -> Acceptance:
        key = (request_id, source)
        if key not in self._rates:
            self._rates[key] = Acceptance(self._prior[source].rate)
        return self._rates[key]


def split_draft(draft: str) -> list[str]:
    """The parts of a `--draft` value; a file's name may hold a comma itself."""
    return [draft] if os.path.exists(draft) else [part for part in draft.split(",") if part]


class _Account:
    """What one request's steps took, and what plain ones would have taken for the same tokens."""

    def __init__(self) -> None:
        self._plain_s = self._total_s = 0.0

    def add(self, plain_s: float, seconds: float) -> None:
        self._plain_s += plain_s
        self._total_s += seconds

    @property
    def speedup(self) -> float | None:
        return self._plain_s / self._total_s if self._total_s else None
