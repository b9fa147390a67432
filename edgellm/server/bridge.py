"""From engine threads into the event loop: many token events, one wake-up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from edgellm.config import SamplingParams

__all__ = ["Bridge", "Feed"]


class Bridge:
    """The inbox of one event loop. Engine threads post; the loop drains all that came since in one callback, so that
    a step of 64 streams wakes it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._inbox: deque[tuple[Feed, Any]] = deque()
        self._armed = False

    def post(self, feed: Feed, event: Any) -> None:
        """From any thread: hands `event` to `feed` in the loop."""
        self._inbox.append((feed, event))
        if not self._armed:
            self._armed = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed: nobody is left to read
                self._inbox.clear()

    def _drain(self) -> None:
        # Disarmed first: an event that comes while we drain wakes the loop once more, which costs little.
        self._armed = False
        while self._inbox:
            feed, event = self._inbox.popleft()
            feed.put(event)


class Feed:
    """The async side of one engine stream: iterates its `TokenEvent`s."""

    def __init__(self, bridge: Bridge):
        self._bridge = bridge
        self._events: deque[Any] = deque()
        self._wake = asyncio.Event()
        self._stream: Any = None
        self._error: Exception | None = None
        self._ended = False

    def start(
        self, submit: Callable[..., Any], prompt: Sequence[int], params: SamplingParams, shown: frozenset[int]
    ) -> None:
        """From a worker thread: submits the request. Raises what the engine refuses it with."""
        self._stream = submit(prompt, params, on_event=lambda event: self._bridge.post(self, event), show=shown)

    def put(self, event: Any) -> None:
        """In the loop: one event arrived."""
        self._events.append(event)
        self._ended = self._ended or event.finish_reason is not None
        self._wake.set()

    def cancel(self) -> None:
        """Ends the request in the engine, within a step or a prefill chunk. Harmless when it has ended."""
        if self._stream is not None and not self._ended:
            self._stream.cancel()

    def fail(self, error: Exception) -> None:
        """In the loop: ends the iteration with `error`, and the request in the engine."""
        self.cancel()
        self._error = error
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            while self._events and self._error is None:
                event = self._events.popleft()
                yield event
                if event.finish_reason is not None:
                    return
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
