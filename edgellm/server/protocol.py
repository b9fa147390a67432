"""uvicorn's HTTP protocol with three additions: limits on how long a request's head may take and on how long a client
may leave its answer unread, and clients that close their sending side only.

A closed sending side (TCP half-close) and a client that has gone look the same: both are an end of file. Whether the
client still reads shows only when something is sent to it, since a system that has no reader left answers with a reset.
So before an answer begins, `100 Continue` is sent (every HTTP/1.1 client must skip it) and the socket's error is read
shortly after; once it has begun, its own pieces do the same.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["GuardedProtocol"]

HEAD_TIMEOUT = 30.0
"""Seconds from the first byte (or the connection) to the end of a request's head."""
_PROBES = (0.0, 0.01, 0.05, 0.2, 0.5)
_PROBE_EVERY = 2.0


class GuardedProtocol(H11Protocol):
    """One connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _probe_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, send_timeout: float = 60.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._send_timeout = send_timeout

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock for the first request's head."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio leaves this off for listening sockets made without a protocol number: 40 ms on each answer.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Restarts or stops the clock, as the head is incomplete or whole."""
        super().data_received(data)
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete:
            if self._head_timer is None:
                self._expect_head()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops all clocks."""
        for timer in (self._head_timer, self._probe_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not keep up: it has `send_timeout` seconds to read some of what waits."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read some."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keeps the connection of a client that may still read its answer; True keeps the transport open."""
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        cycle.keep_alive = False
        self._probe(0)
        return True

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        cycle: Any = self.cycle
        # A connection kept alive after a whole request has uvicorn's own, longer limit.
        if (cycle is None or cycle.response_complete) and self.timeout_keep_alive_task is None:
            self.transport.close()

    def _probe(self, number: int) -> None:
        """Ends the connection if a reset came back; else sends the next probe and looks again later."""
        cycle: Any = self.cycle
        if self.transport.is_closing() or cycle is None or cycle.response_complete:
            return
        sock = self.transport.get_extra_info("socket")
        if sock is None or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not cycle.response_started and cycle.scope["http_version"] == "1.1" and number in (0, len(_PROBES)):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        later = number + 1 if number < len(_PROBES) else number
        delay = _PROBES[later] if later < len(_PROBES) else _PROBE_EVERY
        self._probe_timer = self.loop.call_later(delay, self._probe, later)
