"""The one thread that touches the engine, and the streams other threads read."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from edgellm.config import SamplingParams
from edgellm.engine.engine import Engine
from edgellm.engine.output import Completion, TokenEvent
from edgellm.engine.request import Request, Task
from edgellm.errors import EdgeLLMError, QueueFullError, RequestError

__all__ = ["EngineThread", "Stream"]

log = logging.getLogger(__name__)
T = TypeVar("T")


class Stream:
    """One request's events, for one reader. Iterating ends after the event with a finish_reason; an event of reason
    "error" is handed out like any other, `result` raises it. Events that go to `on_event` cannot be had here, too."""

    def __init__(
        self,
        on_event: Callable[[TokenEvent], None] | None,
        cancel: Callable[[Stream], None],
        may_wait: Callable[[], None],
    ):
        self.request_id: int | None = None
        self.rows: list[Any] = []
        """Row results of requests that want them (logits, hidden states)."""
        self._events: SimpleQueue[TokenEvent] = SimpleQueue()
        self._on_event = on_event
        self._cancel = cancel
        self._may_wait = may_wait
        self._last: TokenEvent | None = None
        self.cancelled = False

    def __iter__(self) -> Iterator[TokenEvent]:
        if self._on_event is not None:
            raise RequestError("this request's events go to its on_event: its stream has none to wait for")
        while self._last is None:
            self._may_wait()
            event = self._events.get()
            if event.finish_reason is not None:
                self._last = event
            yield event

    def cancel(self) -> None:
        """End the request within one step. From any thread; harmless when it has ended."""
        self.cancelled = True
        self._cancel(self)

    def result(self) -> Completion:
        """Wait for the end and return the completion; raises the request's error."""
        for _ in self:
            pass
        assert self._last is not None
        if self._last.error is not None:
            raise self._last.error
        assert self._last.completion is not None
        return self._last.completion

    def put(self, event: TokenEvent) -> None:
        """From the engine thread: one more event."""
        if self._on_event is not None:
            self._on_event(event)
        else:
            self._events.put(event)


class EngineThread:
    """Runs `engine.step()` while there is work. Other threads leave orders; nothing else of theirs touches it."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._orders: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._streams: dict[int, Stream] = {}
        self._queued = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="edgellm-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        on_event: Callable[[TokenEvent], None] | None = None,
        task: Task = Task.GENERATE,
        ctx: int | None = None,
        show: Container[int] = (),
    ) -> Stream:
        """Start a request; thread-safe. Events go to the stream, or to `on_event` (called on the engine thread: it
        must be quick). Raises what is wrong with the prompt, and QueueFullError, before anything runs."""
        self._check_process()
        limit = min(ctx or self.engine.config.ctx, self.engine.config.ctx)
        self.engine.check_prompt(prompt_ids, limit, task)
        stream = Stream(on_event, self._cancel, self._check_may_wait)
        add = partial(self.engine.add_request, prompt_ids, params, task, ctx, show)
        with self._wake:
            most = self.engine.config.max_waiting
            if self._queued + len(self.engine.scheduler.waiting) >= most:
                raise QueueFullError(f"{most} requests are waiting already; try again later")
            self._order(lambda: self._start(stream, add))
            self._queued += 1
        return stream

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine thread between two steps and return its result."""
        self._check_may_wait()
        done: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

        def order() -> None:
            try:
                done.put((function(), None))
            except BaseException as error:
                done.put((None, error))

        self._order(order)
        result, error = done.get()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """Abort what runs, stop the thread, close the engine. Idempotent. A forked child has none of these."""
        if os.getpid() != self._process:
            return
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_process(self) -> None:
        """A forked child has a copy of all this but no engine thread: it would wait for ever, maybe for a lock that
        another thread held at the fork."""
        if os.getpid() != self._process:
            raise EdgeLLMError("the model was opened before this process was forked; open it again in this process")

    def _check_may_wait(self) -> None:
        """Whoever waits for the engine thread must not be that thread, as a callback is."""
        self._check_process()
        if threading.current_thread() is self._thread:
            raise RequestError("a callback of the model cannot wait for the same model; ask it from another thread")

    def _order(self, order: Callable[[], None]) -> None:
        with self._wake:
            if self._failure is not None:
                raise EdgeLLMError(f"the engine has stopped: {self._failure}")
            if self._closed:
                raise EdgeLLMError("the model is closed")
            self._orders.append(order)
            self._wake.notify()

    def _cancel(self, stream: Stream) -> None:
        def order() -> None:
            if stream.request_id is not None:
                self.engine.abort(stream.request_id)

        if os.getpid() != self._process:
            return
        with self._wake:
            if not self._closed and self._failure is None:
                self._orders.append(order)
                self._wake.notify()

    def _start(self, stream: Stream, add: Callable[[], Request]) -> None:
        with self._wake:
            self._queued -= 1
        try:
            request = add()
        except Exception as error:
            known = error if isinstance(error, EdgeLLMError) else EdgeLLMError(f"the request failed: {error}")
            self._tell(stream, TokenEvent("", finish_reason="error", error=known))
            return
        stream.request_id = request.request_id
        stream.rows = self.engine.answers[request.request_id].rows
        self._streams[request.request_id] = stream

    def _run(self) -> None:
        try:
            while self._obey():
                self._deliver(self.engine.step())
            self._carry_out()
            self.engine.close()
            self._deliver(self.engine.step())
        except BaseException as error:
            log.exception("the engine thread stopped")
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Nobody may wait for an engine that has stopped: carry out what was ordered before, then tell all streams,
        those of requests ordered last included, then give back the model."""
        with self._wake:
            self._failure = error
        while self._orders:
            try:
                self._carry_out()
            except BaseException:
                log.exception("an order to the stopped engine failed")
        for stream in self._streams.values():
            reason = EdgeLLMError(f"the engine stopped: {error}")
            self._tell(stream, TokenEvent("", finish_reason="error", error=reason))
        self._streams.clear()
        self.engine.before_close.clear()  # the blocks of a broken engine are not worth keeping
        try:
            self.engine.close()
        except BaseException:
            log.exception("the stopped engine could not be closed")

    def _obey(self) -> bool:
        """Carry out what was ordered; waits while there is nothing to do. False when closed."""
        while True:
            with self._wake:
                while not (self._orders or self._closed or self.engine.has_work):
                    self._wake.wait()
                if self._closed:
                    return False
            self._carry_out()
            if self.engine.has_work:
                return True
            self.engine.check_integrity()

    def _carry_out(self) -> None:
        """What is ordered by now. One at a time, so that an order that fails takes no other with it."""
        for _ in range(len(self._orders)):
            self._orders.popleft()()

    def _deliver(self, events: list[tuple[int, TokenEvent]]) -> None:
        for request_id, event in events:
            stream = self._streams[request_id]
            if event.finish_reason is not None:
                del self._streams[request_id]
            self._tell(stream, event)

    def _tell(self, stream: Stream, event: TokenEvent) -> None:
        """Whatever a listener raises, SystemExit included: it must not end the others' answers."""
        try:
            stream.put(event)
        except BaseException:
            log.exception("a listener failed; its request goes on unheard")
