"""One log line and one count per request, and the last stop for errors that no route expected."""

from __future__ import annotations

import logging
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgellm.errors import CancelledError
from edgellm.server.errors import error_response, status_of, text_of

__all__ = ["Observe"]

_log = logging.getLogger("edgellm.server")


class Observe:
    """ASGI middleware, outermost: names each request, counts it, logs it, and keeps tracebacks from clients."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        name = f"req_{secrets.token_hex(8)}"
        started = time.perf_counter()
        status = 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self.app(scope, receive, observed)
        except Exception as error:
            if not status:
                response = error_response(scope["path"], status_of(error), text_of(error))
                await response(scope, receive, observed)
            elif not isinstance(error, CancelledError):
                _log.error("request=%s broke after its first byte", name, exc_info=error)
        finally:
            self._record(scope, name, status, time.perf_counter() - started)

    @staticmethod
    def _record(scope: Scope, name: str, status: int, seconds: float) -> None:
        path = scope["path"]
        # A pattern of ours, not the path: paths are the client's to choose, and would be labels without end.
        route = getattr(scope.get("route"), "path", None)
        if route is None:  # answered before the routes, or by a Starlette that does not tell which it was
            route = path if any(path == getattr(known, "path", None) for known in scope["app"].routes) else "other"
        scope["app"].state.server.metrics.requests.labels(route, str(status)).inc()
        quiet = path in ("/health", "/metrics")
        level = logging.DEBUG if quiet else logging.INFO
        _log.log(
            level, "request=%s method=%s path=%r status=%d seconds=%.3f", name, scope["method"], path, status, seconds
        )
