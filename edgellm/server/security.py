"""Who may speak to the server: Host and Origin checks, CORS answers and the API key, before any route runs."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgellm.server.errors import error_response
from edgellm.server.settings import ServerSettings

__all__ = ["Guard", "host_allowed", "origin_allowed", "origin_patterns"]

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")
_APP_SCHEMES = ("app", "file", "tauri", "vscode-webview", "vscode-file")
_METHODS = "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"
_STAINLESS = (
    "arch async custom-poll-interval helper helper-method lang os package-version poll-helper retry-count runtime "
    "runtime-version timeout"
)
_HEADERS = ", ".join(
    ["Authorization", "Content-Type", "User-Agent", "Accept", "X-Requested-With"]
    + ["OpenAI-Beta", "OpenAI-Organization", "OpenAI-Project"]
    + ["x-api-key", "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"]
    + [f"x-stainless-{name}" for name in _STAINLESS.split()]
)
_OPEN_PATHS = ("/", "/health", "/ui")
"""Paths that need no key: they tell nothing but that the server is up, and the page that asks for the key."""


def origin_patterns(extra: Iterable[str]) -> list[re.Pattern[str]]:
    """Allowed origins as patterns: `extra` (with `*` as wild card), then this machine's and desktop apps' own."""
    texts = [re.escape(origin.rstrip("/")).replace(r"\*", ".*") for origin in extra]
    texts += [rf"https?://{re.escape(host)}(:\d+)?" for host in _LOCAL_HOSTS]
    texts += [rf"{scheme}://.*" for scheme in _APP_SCHEMES]
    return [re.compile(text, re.IGNORECASE) for text in texts]


def origin_allowed(origin: str, scheme: str, host: str, patterns: Iterable[re.Pattern[str]]) -> bool:
    """Whether a page from `origin` may call a server that it addressed as `scheme`://`host`."""
    if origin.lower() == f"{scheme}://{host}".lower():
        return True
    return any(pattern.fullmatch(origin) for pattern in patterns)


def host_allowed(host: str, own_name: str) -> bool:
    """The guard against DNS rebinding: a loopback server answers only to names that can mean this machine."""
    name = _without_port(host).lower()
    if name in ("", "localhost", own_name.lower()):
        return True
    if name.endswith((".localhost", ".local", ".internal")):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_private or address.is_unspecified


def _without_port(host: str) -> str:
    """`host` as it is where what stands behind its last colon is no port: then no name matches it."""
    match = re.fullmatch(r"\[([^\]]*)\](:\d*)?|([^:]*)(:\d*)?", host)
    return (match[1] or match[3] or "") if match else host


class Guard:
    """ASGI middleware: 403 without a body for a foreign Host or Origin, 204 for a preflight, 401 for a wrong key."""

    def __init__(self, app: ASGIApp, settings: ServerSettings):
        self.app = app
        self.check_host = settings.is_loopback
        self.own_name = socket.gethostname()
        self.patterns = origin_patterns(settings.origins)
        self.key = settings.api_key.encode() if settings.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks one request, then hands it on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        refusal = self._refuse(scope, headers, origin)
        if refusal is not None:
            await refusal(scope, receive, _with_origin(send, origin) if refusal.status_code != 403 else send)
        else:
            await self.app(scope, receive, _with_origin(send, origin))

    def _refuse(self, scope: Scope, headers: Headers, origin: str | None) -> Response | None:
        """The answer to a request that goes no further; None lets it pass."""
        host = headers.get("host", "")
        if self.check_host and not host_allowed(host, self.own_name):
            return Response(status_code=403)
        if origin is not None and not origin_allowed(origin, scope["scheme"], host, self.patterns):
            return Response(status_code=403)
        if origin is not None and scope["method"] == "OPTIONS":
            return _preflight()
        if self.key is not None and not self._open(scope["path"]) and not self._has_key(headers):
            return error_response(scope["path"], 401, "a valid API key is needed: send Authorization: Bearer KEY")
        return None

    @staticmethod
    def _open(path: str) -> bool:
        return path in _OPEN_PATHS or path.startswith("/ui/")

    def _has_key(self, headers: Headers) -> bool:
        assert self.key is not None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.key)


def _preflight() -> Response:
    allow = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Allow-Headers": _HEADERS}
    return Response(status_code=204, headers={**allow, "Access-Control-Max-Age": "43200"})


def _with_origin(send: Send, origin: str | None) -> Send:
    """`send` that adds the CORS headers of an allowed origin to the answer's head."""
    if origin is None:
        return send
    extra = [(b"access-control-allow-origin", origin.encode("latin-1", "replace")), (b"vary", b"Origin")]

    async def send_with_origin(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *extra]
        await send(message)

    return send_with_origin
