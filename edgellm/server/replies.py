"""Replies on their way to the client: first delta before the first byte, whole or streamed, ended when nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgellm.errors import CancelledError
from edgellm.server.errors import status_of, text_of
from edgellm.server.frames import Framer, dumps
from edgellm.server.job import Delta

__all__ = ["Answers", "FrameStream", "JSONReply", "attended", "gone"]

T = TypeVar("T")


class Answers(Protocol):
    """What a generation offers: deltas to read, and an end that frees its slot."""

    def deltas(self) -> AsyncIterator[Delta]:
        """The pieces in order; raises what went wrong."""
        ...

    def close(self) -> None:
        """Cancels what still runs and gives the model back. May be called twice."""
        ...


class JSONReply(Response):
    """A JSON object with the charset named, as Ollama's server does."""

    media_type = "application/json; charset=utf-8"

    def render(self, content: Any) -> bytes:
        """The object as compact JSON."""
        return dumps(content).encode()


async def attended(request: Request, work: Awaitable[T]) -> T:
    """Runs `work` as long as the client is there. The body must have been read.

    Raises CancelledError once the client has gone; `work` is cancelled then.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise CancelledError("request canceled")
    finally:
        left.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def gone(receive: Receive) -> None:
    """Returns when the client has left. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class FrameStream(Response):
    """Streams answers through a framer. `first` was awaited before, so that an error there has its own status."""

    def __init__(self, answers: Answers, first: Delta, rest: AsyncIterator[Delta], framer: Framer):
        self.answers = answers
        self.first = first
        self.rest = rest
        self.framer = framer
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all frames, watching for the client's departure meanwhile."""
        sending = asyncio.ensure_future(self._send_all(send))
        left = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({sending, left}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            # Before anything is awaited: the slot is free from here on.
            self.answers.close()
            left.cancel()
            sending.cancel()
            await asyncio.gather(sending, left, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        kind = self.framer.media_type
        headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._write(send, [*self.framer.open(), *self.framer.push(self.first)])
            async for delta in self.rest:
                frames = self.framer.push(delta)
                if frames:
                    await self._write(send, frames)
            await self._write(send, self.framer.close())
        except Exception as error:
            await self._write(send, self.framer.fail(status_of(error), text_of(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, frames: list[bytes]) -> None:
        """One piece on the wire. Waits for a client that reads slowly; for how long, the protocol says."""
        if frames:
            await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
