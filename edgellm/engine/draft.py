"""A draft model: a second, smaller model that follows each request with its own cache and guesses ahead."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgellm.engine.answer import Answer
from edgellm.engine.kv_cache import KVCache, make_kind
from edgellm.engine.model_runner import Runner
from edgellm.engine.request import Request
from edgellm.engine.sampler import Sampler
from edgellm.engine.scheduler import Schedule, ScheduledRequest
from edgellm.models.config import ModelConfig

__all__ = ["DraftModel", "time_rows"]

CHUNK = 256
"""Tokens the draft model computes at once while it catches up, between two steps of the target."""


class DraftModel:
    """Runs the draft for all requests in one batch. A `shadow` is the draft's own view of a request: the same tokens,
    then its guesses; after each verification it is cut back to what the target accepted."""

    def __init__(
        self,
        runner: Runner,
        config: ModelConfig,
        num_blocks: Sequence[int],
        block_size: int,
        ctx: int,
        vocab_size: int | None = None,
    ):
        self.runner = runner
        self.config = config
        self.vocab_size = vocab_size or config.vocab_size
        """Tokens both models know; a sequence with another one is not drafted for."""
        self.ctx = min(ctx, config.context_length)
        kinds = [make_kind(group, block_size) for group in config.cache_groups]
        self.kv = KVCache(kinds, num_blocks, block_size, runner.copy_block)
        self._shadows: dict[int, Request] = {}
        self.passes: list[tuple[int, int, float, int]] = []
        """Each pass of the last `propose`: sequences, rows, seconds, sum of the sequences' lengths."""

    def measure(self) -> tuple[float, float]:
        """Seconds of one guess, and of one prompt token of catching up; the better of two runs each."""
        n = min(CHUNK, self.ctx) // 2
        return time_rows(self.runner, self.kv, 1), time_rows(self.runner, self.kv, n) / n

    def behind(self, request: Request) -> int:
        """Tokens the draft would have to compute before its first guess for a request."""
        shadow = self._shadows.get(request.request_id)
        return request.num_tokens - (shadow.num_computed_tokens if shadow else 0)

    def room(self, request: Request) -> int:
        """How many tokens the draft can guess before its own context is full."""
        if request.token_ids[-1] >= self.vocab_size:
            return 0
        return max(0, self.ctx - request.num_tokens)

    def catch_up(self, requests: Sequence[Request]) -> int:
        """Compute what the draft lacks, but for the last token of each request: `CHUNK` tokens at most, those of the
        first requests first. Returns how many it were; 0 where the pools have no room."""
        items: list[ScheduledRequest] = []
        left = CHUNK
        for request in requests:
            shadow = self._follow(request) if left else None
            if shadow is None:
                continue
            n = min(left, shadow.num_uncomputed_tokens - 1)
            if n > 0 and self.kv.allocate(shadow, shadow.num_computed_tokens + n):
                items.append(ScheduledRequest(shadow, n, 0))
                left -= n
        if items:
            self.runner.run(Schedule(items))
        for item in items:
            item.request.num_computed_tokens += item.num_scheduled_tokens
            self.kv.advance(item.request)
        return CHUNK - left

    def propose(self, wanted: Sequence[tuple[Answer, int]]) -> list[list[int]]:
        """Guesses per answer, up to the given depth. Each guess is what the target would say if it had the draft's
        logits: the same settings, and the random number the target is going to use there."""
        self.passes = []
        guessers = [_Guesser(answer.sampler, self._follow(answer.request), depth) for answer, depth in wanted]
        try:
            for _ in range(max((depth for _, depth in wanted), default=0)):
                going = [g for g in guessers if g.shadow and self.kv.allocate(g.shadow, g.shadow.num_tokens)]
                if not going:
                    break
                for guesser, logits in zip(going, self._pass(going), strict=True):
                    guesser.take(logits[: self.vocab_size])
        finally:
            for guesser in guessers:
                guesser.sampler.take_back()
        return [guesser.guesses for guesser in guessers]

    def forget(self, request_id: int) -> None:
        """The request has ended: give its blocks back."""
        shadow = self._shadows.pop(request_id, None)
        if shadow is not None:
            self.kv.free(shadow)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the draft's tables and pools agree."""
        self.kv.check_integrity(list(self._shadows.values()))

    def close(self) -> None:
        """Give back the draft's memory."""
        self.runner.close()

    def _pass(self, guessers: Sequence[_Guesser]) -> list[npt.NDArray[np.float32]]:
        """Logits (vocab,) after the last token of each shadow."""
        shadows = [guesser.shadow for guesser in guessers if guesser.shadow]
        items = [ScheduledRequest(shadow, shadow.num_uncomputed_tokens, 0) for shadow in shadows]
        began = time.perf_counter()
        rows = self.runner.run(Schedule(items))
        seconds = time.perf_counter() - began
        num_rows = sum(item.num_scheduled_tokens for item in items)
        self.passes.append((len(items), num_rows, seconds, sum(shadow.num_tokens for shadow in shadows)))
        return [row[0] for row in rows]

    def _follow(self, request: Request) -> Request | None:
        """The shadow with exactly the request's tokens; None when the draft's pools have no room for it."""
        shadow = self._shadows.get(request.request_id)
        if shadow is None:
            if max(request.token_ids) >= self.vocab_size:
                return None
            shadow = Request(request.request_id, list(request.token_ids), max_tokens=1)
            shadow.rope_variant = self.config.rope_variant(self.ctx)
            if not self.kv.admit(shadow, 0):
                return None
            self._shadows[request.request_id] = shadow
        known = shadow.token_ids
        same = min(shadow.num_computed_tokens, len(request.token_ids) - 1)
        verified = min(shadow.num_prompt_tokens, same)
        while verified < same and known[verified] == request.token_ids[verified]:
            verified += 1
        shadow.token_ids = list(request.token_ids)
        shadow.num_prompt_tokens = len(shadow.token_ids)
        shadow.num_computed_tokens = min(same, verified)
        self.kv.advance(shadow)
        self.kv.roll_back(shadow)
        return shadow


class _Guesser:
    """One request's run of guesses. `shadow` is None once no more are wanted or possible."""

    def __init__(self, sampler: Sampler, shadow: Request | None, depth: int):
        self.sampler = sampler
        self.shadow = shadow if depth else None
        self.guesses: list[int] = []
        self._numbers = sampler.peek(depth)

    def take(self, logits: npt.NDArray[np.float32]) -> None:
        """The draft's logits for the next guess."""
        assert self.shadow is not None
        self.shadow.num_computed_tokens = self.shadow.num_tokens
        guess = self.sampler.guess(logits, self._numbers[len(self.guesses)])
        if guess is None:
            self.shadow = None
            return
        self.shadow.token_ids.append(guess)
        self.guesses.append(guess)
        if self.sampler.suppose(guess) or len(self.guesses) == len(self._numbers):
            self.shadow = None


def time_rows(runner: Runner, kv: KVCache, n: int, drafts: int = 0) -> float:
    """Seconds of a step over n rows of one sequence, `drafts` of them guesses whose logits are wanted too: the best of
    two after one that prepares. Nothing of it stays in the cache."""
    request = Request(-1, [0] * (n - drafts), 1, share_prefix=False, draft_ids=[0] * drafts)
    if not kv.admit(request, 0) or not kv.allocate(request, n):
        return 0.0
    schedule = Schedule([ScheduledRequest(request, n, drafts)])
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        runner.run(schedule)
        seconds.append(time.perf_counter() - began)
    kv.free(request)
    return min(seconds[1:])
