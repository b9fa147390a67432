"""The engine: requests in, token events out, one step at a time. Not thread-safe: `thread.py` gives it its thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict
from typing import Any

import numpy.typing as npt

from edgellm.config import EngineConfig, SamplingParams
from edgellm.engine.ahead import BlocksAhead
from edgellm.engine.answer import Answer
from edgellm.engine.kv_cache import KVCache, make_kind
from edgellm.engine.metrics import Metrics
from edgellm.engine.model_runner import Runner
from edgellm.engine.output import TokenEvent, TokenText
from edgellm.engine.pacer import GRACE, Pacer
from edgellm.engine.request import Request, Task
from edgellm.engine.scheduler import Schedule, ScheduledRequest, Scheduler, SwapSpace
from edgellm.engine.slices import LONG, Slices, take_prompts
from edgellm.engine.speculate import Speculator
from edgellm.errors import ContextLengthError, EdgeLLMError, RequestError
from edgellm.memory import MAX_CHUNK, MemoryPlan, block_bytes
from edgellm.models.config import ModelConfig

__all__ = ["Engine"]

log = logging.getLogger(__name__)

LOGITS_PER_STEP = 1 << 24
"""Numbers that a request for all logits may take out of one step."""


class Engine:
    """Schedules requests over one model. `num_blocks`: blocks per cache group, the null block not counted."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        runner: Runner,
        tokenizer: TokenText,
        num_blocks: Sequence[int],
        swap: SwapSpace | None = None,
        speculator: Speculator | None = None,
    ):
        self.config = config
        self.model_config = model_config
        self.runner = runner
        self.tokenizer = tokenizer
        kinds = [make_kind(group, config.block_size) for group in model_config.cache_groups]
        self.kv = KVCache(kinds, num_blocks, config.block_size, runner.copy_block, config.prefix_sharing)
        growing = {g: self.kv.pools[g] for g, group in enumerate(model_config.cache_groups) if not group.window}
        self.ahead = BlocksAhead(growing, runner.touch_block)
        self.pacer = Pacer(config.max_batch_tokens)
        self.slices = Slices(runner, config.max_batch_tokens)
        self.scheduler = Scheduler(self.kv, config.max_seqs, config.max_waiting, swap, self.slices.drop_with)
        self.speculator = speculator
        self.metrics = Metrics()
        self.answers: dict[int, Answer] = {}
        self.plan: MemoryPlan | None = None
        """What this engine was sized by, where it runs a file."""
        self.facts: dict[str, Any] = {}
        """What whoever made this engine adds to `stats`."""
        self.before_close: list[Callable[[], None]] = []
        """Called by `close` when nothing runs any more and the blocks can still be read."""
        self._next_id = 0
        self._told = 0.0
        self._closing: list[tuple[int, TokenEvent]] = []

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        task: Task = Task.GENERATE,
        ctx: int | None = None,
        show: Container[int] = (),
    ) -> Request:
        """Queue a request. `ctx`: its own context limit, at most the engine's. `show`: control tokens that are text.

        Raises RequestError (empty prompt, ids outside the vocabulary), ContextLengthError, QueueFullError."""
        params = params or SamplingParams()
        limit = min(ctx or self.config.ctx, self.config.ctx)
        self.check_prompt(prompt_ids, limit, task)
        room = limit - len(prompt_ids) if task is Task.GENERATE else 0
        max_tokens = room if params.max_tokens < 0 else min(params.max_tokens, room)
        request = Request(self._next_id, list(prompt_ids), max_tokens, task)
        request.rope_variant = self.model_config.rope_variant(len(prompt_ids) + max_tokens)
        request.whole_prompt = not self.model_config.causal
        if task is Task.LOGITS:  # a step's result stays small on large vocabularies, too
            request.max_chunk = min(MAX_CHUNK, max(32, LOGITS_PER_STEP // self.model_config.vocab_size))
        request.share_prefix = task is Task.GENERATE and self.model_config.causal
        answer = Answer(request, params, self.tokenizer, show)
        self.scheduler.add(request)
        self._next_id += 1
        self.answers[request.request_id] = answer
        return request

    def check_prompt(self, prompt_ids: Sequence[int], limit: int, task: Task = Task.GENERATE) -> None:
        """Raise what `add_request` would say about a prompt."""
        if not prompt_ids:
            raise RequestError("the prompt has no tokens")
        if len(prompt_ids) > limit - (task is Task.GENERATE):
            raise ContextLengthError(len(prompt_ids), limit, answered=task is Task.GENERATE)
        low, high = min(prompt_ids), max(prompt_ids)
        if low < 0 or high >= self.model_config.vocab_size:
            wrong = low if low < 0 else high
            raise RequestError(f"the prompt holds token {wrong}, the vocabulary has {self.model_config.vocab_size}")

    def step(self) -> list[tuple[int, TokenEvent]]:
        """Advance every scheduled request; returns (request_id, event) pairs, those of aborted requests included."""
        began = time.perf_counter()
        since = self._told if self.scheduler.running else began
        num_settled = self._num_settled()
        if self.slices.schedule or (num_settled and self.runner.can_pause and self._is_next_prompt_long()):
            self._speculate()
            self._step_with_slice(since, num_settled)
        else:
            self.ahead.advance(len(self.scheduler.running))
            self.pacer.spent = time.perf_counter() - began
            self._speculate()
            schedule = self.scheduler.schedule(self.pacer.budget(num_settled))
            self._compute(schedule, num_settled)
            if num_settled and _is_plain(schedule):
                self.slices.observe(time.perf_counter() - since, len(schedule.items), alone=True)
        self._told = time.perf_counter()
        return self._events()

    def abort(self, request_id: int) -> None:
        """End a request before its next step; its last event comes from the next `step`. Unknown ids are ignored."""
        if request_id in self.answers:
            self._finish(self.answers[request_id], "abort")

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or tell anything."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._closing)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as plain data: queues, totals, recent medians, blocks per group, the memory plan."""
        sizes = block_bytes(self.model_config, self.config.kv_type, self.config.block_size)
        pools = [
            {
                "kind": type(kind).__name__,
                "block_bytes": size,
                "blocks": pool.num_blocks,
                "free": pool.num_free,
                "cached": pool.num_cached,
                "used": pool.num_blocks - pool.num_free,
            }
            for kind, pool, size in zip(self.kv.kinds, self.kv.pools, sizes, strict=True)
        ]
        queues = {"running": len(self.scheduler.running), "waiting": len(self.scheduler.waiting)}
        speculation = self.speculator.snapshot() if self.speculator else None
        more: dict[str, Any] = {"block_size": self.config.block_size, "cache_groups": pools, "speculation": speculation}
        if self.plan:
            more |= {"memory": asdict(self.plan), "memory_bytes": self.plan.total_bytes}
        return {**queues, **self.metrics.snapshot(), **more, **self.facts}

    def check_integrity(self) -> None:
        """Raise RuntimeError unless queues, tables, pools and answers agree."""
        self.scheduler.check_integrity()
        known = {r.request_id for r in (*self.scheduler.running, *self.scheduler.waiting)}
        if known != self.answers.keys():
            raise RuntimeError(f"answers {sorted(self.answers)} for requests {sorted(known)}")

    def close(self) -> None:
        """Abort everything and give back the model. Idempotent."""
        try:
            for answer in list(self.answers.values()):
                self._finish(answer, "abort")
            functions, self.before_close = self.before_close, []
            for function in functions:
                function()
        finally:
            if self.speculator:
                self.speculator.close()
            self.runner.close()

    def _speculate(self) -> None:
        """Guess ahead where all that runs is decoding: prompt tokens would blur what a guess costs."""
        scheduler = self.scheduler
        admits = scheduler.waiting and not scheduler.blocked
        if not (self.speculator and scheduler.running) or admits or scheduler.num_decoding < len(scheduler.running):
            return
        try:
            self.speculator.propose([self.answers[request.request_id] for request in scheduler.running])
        except Exception:
            log.exception("the draft failed; decoding goes on without it")
            self.speculator = None

    def _num_settled(self) -> int:
        """Answers under way that somebody reads along with."""
        decoding = (r for r in self.scheduler.running if r.num_uncomputed_tokens == 1)
        return sum(r.num_new_tokens > GRACE for r in decoding)

    def _is_next_prompt_long(self) -> bool:
        waiting = (r for r in (*self.scheduler.running, *self.scheduler.waiting) if r.num_uncomputed_tokens > 1)
        first = next(waiting, None)
        return first is not None and first.num_tokens > LONG

    def _compute(self, schedule: Schedule, num_settled: int) -> None:
        """Run what is scheduled, and what follows from it."""
        started = time.perf_counter()
        if schedule.items and (rows := self._run(schedule)):
            results = self._advance_all(schedule, rows)
            self._learn(schedule, results, num_settled, time.perf_counter() - started)
            self._finish_ended(results)

    def _step_with_slice(self, since: float, num_settled: int) -> None:
        """Decode, then go on with the pass over prompt tokens (or begin one) for as long as the step may still take.
        `since`: when the last tokens were told, from which on their readers wait."""
        schedule = self.scheduler.schedule(self.slices.budget())
        prompts = take_prompts(schedule)
        self._compute(schedule, num_settled)
        if _is_plain(schedule):
            alone = not (self.slices.schedule or prompts.items)
            self.slices.observe(time.perf_counter() - since, len(schedule.items), alone)
        self.ahead.advance(len(self.scheduler.running), self.slices.time_left(since))
        while self._advance_pass(prompts, since, num_settled > 0) and num_settled and self.slices.has_time(since):
            prompts = take_prompts(self.scheduler.schedule(self.slices.budget(), decoding=False))

    def _advance_pass(self, prompts: Schedule, since: float, waited_for: bool) -> bool:
        """Begin a pass over `prompts`, if there are any, or go on with the one under way. True if it is done."""
        started, rows = time.perf_counter(), None
        try:
            if prompts.items:
                self._mark_started(prompts)
                self.slices.begin(prompts)
            prompts = self.slices.schedule or prompts
            if prompts.items:
                rows = self.slices.advance(time.perf_counter() - since, waited_for)
        except Exception as error:
            self.slices.drop()
            self._fail(prompts, error)
            return False
        self.metrics.sliced(time.perf_counter() - started, prompts.num_tokens if rows else 0)
        if rows:
            self._finish_ended(self._advance_all(prompts, rows))
        return rows is not None

    def _mark_started(self, schedule: Schedule) -> None:
        now = time.perf_counter()
        for item in schedule.items:
            answer = self.answers[item.request.request_id]
            answer.started = answer.started or now

    def _advance_all(self, schedule: Schedule, rows: Sequence[npt.NDArray[Any]]) -> list[tuple[Answer, int, int]]:
        return [self._advance(item, some, schedule) for item, some in zip(schedule.items, rows, strict=True)]

    def _finish_ended(self, results: list[tuple[Answer, int, int]]) -> None:
        for answer, _, _ in results:
            if answer.finish_reason:
                self._finish(answer, answer.finish_reason)

    def _fail(self, schedule: Schedule, error: Exception) -> None:
        """A failing model ends the requests it was computing, not the engine."""
        for item in schedule.items:
            self._finish(self.answers[item.request.request_id], "error", _known(error, "the model failed"))

    def _learn(
        self, schedule: Schedule, results: list[tuple[Answer, int, int]], num_settled: int, seconds: float
    ) -> None:
        """Times of a step, for those who choose by them."""
        num_drafts = sum(item.num_draft_tokens for item in schedule.items)
        if not num_drafts:
            self.pacer.observe(seconds, schedule.num_prefill_tokens, schedule.prefill_depth, num_settled)
        if self.speculator and results and not schedule.num_prefill_tokens:
            self.speculator.observe(results, seconds)
        self.metrics.stepped(schedule, seconds)

    def _run(self, schedule: Schedule) -> list[npt.NDArray[Any]]:
        """The step's rows, none where the model fails."""
        self._mark_started(schedule)
        try:
            return self.runner.run(schedule)
        except Exception as error:
            self._fail(schedule, error)
            schedule.items.clear()
            return []

    def _advance(self, item: ScheduledRequest, rows: npt.NDArray[Any], schedule: Schedule) -> tuple[Answer, int, int]:
        """Apply one item's result: tokens become known, rows become valid, and the request perhaps ends. Returns the
        answer, how many guesses were verified and how many tokens are new."""
        request, answer = item.request, self.answers[item.request.request_id]
        drafts, request.draft_ids = request.draft_ids[: item.num_draft_tokens], []
        accepted: list[int] = []
        if request.task is not Task.GENERATE:
            if not request.num_computed_tokens:  # perhaps again, after a preemption
                answer.rows.clear()
            answer.rows.append(rows)
        elif len(rows):
            try:
                accepted = answer.accept(rows, drafts, schedule.picks.get(request.request_id, ()))
            except Exception as error:  # a grammar may raise anything; the others' answers go on
                answer.close("error", _known(error, "choosing a token failed"))
                return answer, 0, 0
        request.num_computed_tokens += item.num_scheduled_tokens - len(drafts) + max(0, len(accepted) - 1)
        request.token_ids += accepted
        self.kv.advance(request)
        self.kv.roll_back(request)
        if not request.max_tokens and request.num_computed_tokens == request.num_tokens:
            answer.close("length")
        return answer, len(drafts), len(accepted)

    def _finish(self, answer: Answer, reason: str, error: EdgeLLMError | None = None) -> None:
        answer.close(reason, error)
        self.slices.drop_with(answer.request)
        self.scheduler.finish(answer.request)
        del self.answers[answer.request.request_id]
        if self.speculator:
            self.speculator.finished(answer)
        self.metrics.finished(answer)
        if event := answer.event():
            self._closing.append((answer.request.request_id, event))

    def _events(self) -> list[tuple[int, TokenEvent]]:
        events, self._closing = self._closing, []
        for request_id, answer in self.answers.items():
            if event := answer.event():
                events.append((request_id, event))
        return events


def _is_plain(schedule: Schedule) -> bool:
    """Whether a step decodes and does nothing else."""
    return bool(schedule.items) and not any(i.num_draft_tokens or i.num_scheduled_tokens > 1 for i in schedule.items)


def _known(error: Exception, what: str) -> EdgeLLMError:
    """An error with a message for the user; one of ours goes to the log with its traceback."""
    if isinstance(error, EdgeLLMError):
        return error
    log.error("%s", what, exc_info=error)
    return EdgeLLMError(f"{what}: {error}")
