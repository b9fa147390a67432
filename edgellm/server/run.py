"""Running the server: the socket, uvicorn, signals, and an end that does not cut answers off."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from edgellm.errors import EdgeLLMError
from edgellm.server.errors import ShuttingDown
from edgellm.server.protocol import GuardedProtocol
from edgellm.server.settings import ServerSettings

__all__ = ["EdgeServer", "bind", "serve", "setup_logging"]

_log = logging.getLogger("edgellm.server")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises EdgeLLMError when the port is taken or not ours to take."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise EdgeLLMError(
                f"port {port} on {host} is in use (by Ollama or another edgellm?); stop that program, "
                "or choose another port with --port"
            ) from None
        raise EdgeLLMError(f"can't listen on {host} port {port}: {error.strerror or error}") from None
    sock.setblocking(False)
    return sock


class EdgeServer(uvicorn.Server):
    """uvicorn's server, which first lets running answers end, then ends what is left in words."""

    def __init__(self, app: Starlette, settings: ServerSettings):
        config = uvicorn.Config(
            app,
            http=functools.partial(GuardedProtocol, send_timeout=settings.send_timeout),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            backlog=2048,
        )
        super().__init__(config)
        self.app = app
        self.grace = settings.grace

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Listens for SIGINT and SIGTERM. Unlike uvicorn's, this does not raise them again at the end: stopping when
        told to is success."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen. Raises what kept a model from being loaded: an error for the user, where uvicorn has only
        tracebacks."""
        await super().startup(sockets)
        if failure := self.app.state.server.failure:
            await self.shutdown(sockets)
            raise failure

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuses new work, waits for running answers up to the grace time, ends the rest, then closes."""
        state = self.app.state.server
        state.draining = True
        for server in self.servers:
            server.close()
        if state.running:
            _log.info(
                "stopping: up to %g s for %d running answers; Ctrl-C again ends them", self.grace, len(state.running)
            )
        deadline = asyncio.get_running_loop().time() + self.grace
        while state.running and not self.force_exit and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for generation in list(state.running):
            generation.fail(ShuttingDown("the server is shutting down"))
        self.force_exit = False  # or uvicorn leaves the application's own end half-way, with a traceback
        await super().shutdown(sockets)


def serve(app: Starlette, settings: ServerSettings, sock: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM. Raises EdgeLLMError when a model that is to be loaded at once cannot be."""
    server = EdgeServer(app, settings)
    server.run(sockets=[sock])


def setup_logging(debug: bool) -> None:
    """Lines of `time level message` on stderr; messages are key=value pairs."""
    handler: Any = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s level=%(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"))
    for name in ("edgellm", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(logging.DEBUG if debug else logging.INFO if name == "edgellm" else logging.WARNING)
