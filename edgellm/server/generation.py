"""Jobs in the engine: model leased, prompts built, requests submitted, token events read back as deltas."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgellm.chat.tools import Parser
from edgellm.config import SamplingParams
from edgellm.errors import CancelledError, EdgeLLMError
from edgellm.server.bridge import Bridge, Feed
from edgellm.server.job import Delta, Finish, Job, ToolCall
from edgellm.server.manager import Lease
from edgellm.server.metrics import Metrics
from edgellm.server.prepare import Prepared, prepare

__all__ = ["Generation"]


@dataclass
class _Answer:
    """One of the answers while it runs."""

    index: int
    feed: Feed
    prepared: Prepared
    params: SamplingParams
    parser: Parser
    n_calls: int = 0
    n_thought: int = 0


class Generation:
    """All answers of one request, job by job. Made by `start`; `close` frees everything, at any time."""

    def __init__(self, lease: Lease, answers: Sequence[_Answer], metrics: Metrics, started: float):
        self._lease = lease
        self._answers = answers
        self._metrics = metrics
        self._started = started
        self._first_token: float | None = None
        self.on_close: Callable[[Generation], None] | None = None

    @classmethod
    async def start(
        cls, lease: Lease, jobs: Sequence[Job], bridge: Bridge, metrics: Metrics, started: float
    ) -> Generation:
        """Builds the prompts and submits the jobs' requests, in a worker thread: long prompts take a while.

        Raises what is wrong with a job before any byte of an answer is out. Gives the lease back if it fails.
        """
        answers: list[_Answer] = []

        def submit() -> None:
            for job in jobs:
                prepared = prepare(job, lease.loaded)
                for params in prepared.params:
                    answers.append(_Answer(len(answers), Feed(bridge), prepared, params, prepared.parser()))
            for answer in answers:
                prepared = answer.prepared
                answer.feed.start(lease.llm.submit, prepared.ids, answer.params, prepared.shown)

        def abandon(*_: object) -> None:
            for answer in answers:
                answer.feed.cancel()
            lease.release()

        work = asyncio.get_running_loop().run_in_executor(None, submit)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            # The thread can't be stopped: what it submits is cancelled when it is done.
            work.add_done_callback(abandon)
            raise
        except BaseException:
            abandon()
            raise
        return cls(lease, answers, metrics, started)

    async def deltas(self) -> AsyncIterator[Delta]:
        """The pieces of all answers as they come. Raises an EdgeLLMError when the engine gave a request up."""
        if len(self._answers) == 1:
            async for delta in self._of(self._answers[0]):
                yield delta
            return
        queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._into(queue, answer)) for answer in self._answers]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    async def _into(self, queue: asyncio.Queue[Delta | BaseException | None], answer: _Answer) -> None:
        try:
            async for delta in self._of(answer):
                queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    async def _of(self, answer: _Answer) -> AsyncIterator[Delta]:
        """One answer: token events through the reply parser."""
        first = True
        async for event in answer.feed:
            if self._first_token is None and event.ids:
                self._first_token = time.perf_counter()
            if event.finish_reason == "error":
                raise event.error or EdgeLLMError("the engine gave the request up")
            if event.finish_reason == "abort":
                raise CancelledError("the request was cancelled")
            delta = self._delta(answer, event)
            if delta.content or delta.thinking or delta.tool_calls or delta.logprobs or delta.finish:
                if first:
                    prepared, first = answer.prepared, False
                    delta = replace(delta, content=prepared.echo + delta.content, prompt_tokens=len(prepared.ids))
                yield delta

    def _delta(self, answer: _Answer, event: Any) -> Delta:
        pieces = answer.parser.push(event.text) if event.text else []
        if len(pieces) == 1 and pieces[0].content and event.finish_reason is None and not event.logprobs:
            return Delta(answer.index, pieces[0].content)
        if event.finish_reason is not None:
            pieces = [*pieces, *answer.parser.finish()]
        content = "".join(piece.content for piece in pieces)
        thinking = "".join(piece.thinking for piece in pieces)
        calls = []
        for piece in pieces:
            for name, arguments in piece.calls:
                calls.append(ToolCall(answer.n_calls, name, arguments))
                answer.n_calls += 1
        if thinking:
            answer.n_thought += len(event.ids)
        finish = self._finish(answer, event) if event.finish_reason is not None else None
        logprobs = tuple(event.logprobs or ())
        return Delta(answer.index, content, thinking, tuple(calls), logprobs, finish)

    def _finish(self, answer: _Answer, event: Any) -> Finish:
        completion = event.completion
        now = time.perf_counter()
        first = self._first_token or now
        timings = completion.timings
        ids = tuple(completion.ids)
        finish = Finish(
            reason=event.finish_reason,
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            new_tokens=len(ids),
            reasoning_tokens=answer.n_thought,
            miss_reason=timings.get("miss_reason"),
            load_s=self._lease.load_s,
            prefill_s=timings.get("prefill_s", 0.0),
            decode_s=timings.get("decode_s", now - first),
            total_s=now - self._started,
            ids=(*answer.prepared.ids, *ids),
            truncated=answer.prepared.truncated,
            stop=completion.stop,
        )
        self._metrics.finished(self._lease.loaded.record.name, finish, first - self._started)
        return finish

    def fail(self, error: EdgeLLMError) -> None:
        """Ends all answers with `error`, as if the engine had given them up."""
        for answer in self._answers:
            answer.feed.fail(error)

    def close(self) -> None:
        """Cancels what still runs and gives the model back."""
        for answer in self._answers:
            with contextlib.suppress(EdgeLLMError):
                answer.feed.cancel()
        self._lease.release()
        if self.on_close is not None:
            self.on_close(self)
