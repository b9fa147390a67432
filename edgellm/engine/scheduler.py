"""Which requests run in a step, and with how many tokens. Plain Python on ints; no model, no arrays.

There is no prefill or decode phase. Every step, each running request is given tokens until what is computed has caught
up with what is known; a prompt chunk, the rest after a prefix hit, one decoded token and a verified draft differ only
in how far apart the two are. Requests that are one token behind (decoding) always run; prompt tokens share the step's
budget (pacer.py, slices.py), so that a long prompt never stalls running answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgellm.engine.kv_cache import KVCache
from edgellm.engine.pacer import Budget
from edgellm.engine.request import Request, Status, Task
from edgellm.errors import QueueFullError

__all__ = ["Schedule", "ScheduledRequest", "Scheduler", "SwapSpace"]


class SwapSpace(Protocol):
    """Where blocks of preempted requests are spilled to. Keys are request ids."""

    def save(self, request_id: int, tables: list[list[int]]) -> bool:
        """Copy the rows of all blocks out; False when there is no room."""

    def load(self, request_id: int, tables: list[list[int]]) -> bool:
        """Copy the rows back into tables of the same shape, and forget them. False when they cannot be read."""

    def drop(self, request_id: int) -> None:
        """Forget the rows of a request, if there are any."""


@dataclass(frozen=True)
class ScheduledRequest:
    """Tokens from `request.num_computed_tokens` on: known ones, then `num_draft_tokens` of its drafts."""

    request: Request
    num_scheduled_tokens: int
    num_draft_tokens: int

    @property
    def num_output_rows(self) -> int:
        """Last rows whose result is wanted: none inside a prompt, one at its end, one more per draft."""
        if self.request.task is not Task.GENERATE:
            return self.num_scheduled_tokens
        caught_up = self.num_scheduled_tokens - self.num_draft_tokens == self.request.num_uncomputed_tokens
        return 1 + self.num_draft_tokens if caught_up and self.request.max_tokens else 0


@dataclass
class Schedule:
    """One step's work, in the order of the batch."""

    items: list[ScheduledRequest] = field(default_factory=list)
    num_prefill_tokens: int = 0
    prefill_depth: int = 0  # tokens before a prompt token, the mean over the step's
    picks: dict[int, Sequence[tuple[float, int]]] = field(default_factory=dict)  # by request id, see `Runner.run`

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(item.num_scheduled_tokens for item in self.items)


class Scheduler:
    """Queues and the choice of what runs. `running` and `waiting` are in order of arrival, and all of `running` came
    before all of `waiting`: the oldest request can take blocks from all others, so something always advances."""

    def __init__(
        self,
        kv: KVCache,
        max_seqs: int,
        max_waiting: int,
        swap: SwapSpace | None = None,
        on_preempt: Callable[[Request], None] = lambda request: None,
    ):
        self.kv = kv
        self.max_seqs = max_seqs
        self.max_waiting = max_waiting
        self.swap = swap
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.blocked = False  # whether the last step left requests waiting: there was no room for them
        self._on_preempt = on_preempt

    @property
    def num_decoding(self) -> int:
        """Running requests that are one token behind."""
        return sum(request.num_uncomputed_tokens == 1 for request in self.running)

    def add(self, request: Request) -> None:
        """Queue a new request; QueueFullError when `max_waiting` wait already."""
        if len(self.waiting) >= self.max_waiting:
            raise QueueFullError(f"{len(self.waiting)} requests are waiting already; try again later")
        self.waiting.append(request)

    def schedule(self, budget: Budget, decoding: bool = True) -> Schedule:
        """Choose this step's tokens and take their blocks; prompts share the budget in order. `decoding`: the rest."""
        chosen: dict[Request, ScheduledRequest] = {}
        num_waiting = len(self.waiting)
        for request in sorted(self.running, key=lambda r: r.num_uncomputed_tokens > 1):
            if request.status is not Status.RUNNING or request.computing:
                continue  # gave its blocks to an older one a moment ago, or is in a pass under way
            n = int(decoding) if request.num_uncomputed_tokens == 1 else budget.take(request)
            if n and self._reserve(request, n):
                chosen[request] = self._item(request, n)
        if len(self.waiting) == num_waiting:
            self._admit_waiting(chosen, budget)
        self.blocked = bool(self.waiting)
        schedule = Schedule([chosen[r] for r in self.running if r in chosen])
        prompts = [i for i in schedule.items if i.request.num_uncomputed_tokens > 1]
        schedule.num_prefill_tokens = sum(i.num_scheduled_tokens for i in prompts)
        before = sum(i.num_scheduled_tokens * i.request.num_computed_tokens for i in prompts)
        schedule.prefill_depth = before // max(1, schedule.num_prefill_tokens)
        return schedule

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and give back all it holds."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
            if request.swapped and self.swap:
                self.swap.drop(request.request_id)
                request.block_tables = []
        if request.block_tables:
            self.kv.free(request)
        request.status = Status.FINISHED

    def check_integrity(self) -> None:
        """Raise RuntimeError unless queues, tables and pools agree."""
        for queue, status in ((self.running, Status.RUNNING), (self.waiting, Status.WAITING)):
            if any(request.status is not status for request in queue):
                raise RuntimeError(f"a request in the {status.value} queue has another status")
        order = [request.request_id for request in (*self.running, *self.waiting)]
        if order != sorted(order):
            raise RuntimeError(f"requests are out of order: {order}")
        self.kv.check_integrity(self.running)

    def _item(self, request: Request, n: int) -> ScheduledRequest:
        drafts = len(request.draft_ids) if n == request.num_uncomputed_tokens else 0
        return ScheduledRequest(request, n + drafts, drafts)

    def _reserve(self, request: Request, n: int) -> bool:
        """Blocks for n more tokens and the drafts, taken from younger requests where the pools are empty. False when
        the request is the youngest itself: it keeps what it has and sits this step out."""
        while not self.kv.allocate(request, request.num_computed_tokens + n + len(request.draft_ids)):
            if request.draft_ids:  # a guess is never worth another's blocks
                request.draft_ids = []
            elif self.running[-1] is not request:
                self._preempt(self.running[-1])
            elif len(self.running) > 1:
                return False
            else:
                raise RuntimeError("the block pool is smaller than one context")
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the front of the queue, without blocks: their rows are spilled, or computed again later."""
        self.running.remove(request)
        request.num_preemptions += 1
        request.draft_ids = []
        kept = request.block_tables, request.num_released, request.num_computed_tokens
        request.swapped = self.swap is not None and self.swap.save(request.request_id, request.block_tables)
        self.kv.free(request)
        if request.swapped:
            request.block_tables, request.num_released, request.num_computed_tokens = kept
        request.status = Status.WAITING
        self.waiting.appendleft(request)
        self._on_preempt(request)

    def _admit_waiting(self, chosen: dict[Request, ScheduledRequest], budget: Budget) -> None:
        """First come, first served: the first one that does not fit keeps those behind it waiting, too."""
        while self.waiting and len(self.running) < self.max_seqs and budget.tokens > 0:
            request = self.waiting[0]
            if not (self.kv.readmit if request.swapped else self.kv.admit)(request, headroom=len(self.running)):
                return
            if request.swapped and self.swap:
                request.swapped = False
                if not self.swap.load(request.request_id, request.block_tables):
                    self.kv.free(request)
                    continue  # as one that was never swapped: computed again
            self.waiting.popleft()
            self.running.append(request)
            request.status = Status.RUNNING
            n = budget.take(request)
            if n and self.kv.allocate(request, request.num_computed_tokens + n):
                chosen[request] = self._item(request, n)
