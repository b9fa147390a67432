"""One error, four wire shapes: Ollama's string, OpenAI's object, Anthropic's typed object, plain text elsewhere."""

from __future__ import annotations

import json
import logging
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from edgellm.errors import ContextLengthError, EdgeLLMError, QueueFullError

__all__ = ["ShuttingDown", "dialect", "error_body", "error_response", "on_error", "on_http_error"]
__all__ += ["status_of", "text_of"]


class ShuttingDown(EdgeLLMError):
    """Work that came, or still ran, when the server was told to stop."""

    http_status = 503


_log = logging.getLogger("edgellm.server")
_OPENAI_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_TOO_LONG = {
    "anthropic": "prompt is too long: {prompt} tokens > {most} maximum (the context holds {ctx}; one must stay free "
    "for the answer)",
    "openai": "This model's maximum context length is {ctx} tokens. However, your prompt has {prompt} tokens (one must "
    "stay free for the answer); shorten it or raise the context length",
}
"""As the vendors begin it: clients that shorten a conversation and try again know the case by these words."""
_PLAIN = {404: "404 page not found", 405: "405 method not allowed"}


def dialect(path: str) -> str:
    """`ollama`, `openai`, `anthropic` or `text`: whose error shape a path speaks."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    if path.startswith("/v1/"):
        return "openai"
    return "ollama" if path.startswith("/api/") else "text"


def error_body(kind: str, status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """The JSON object that tells an error in the given dialect."""
    if kind == "anthropic":
        error = {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": message}
        return {"type": "error", "error": error, "request_id": f"req_{secrets.token_hex(12)}"}
    if kind == "openai":
        kind_of_error = _OPENAI_TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
        return {"error": {"message": message, "type": kind_of_error, "param": None, "code": code}}
    return {"error": message}


def error_response(path: str, status: int, message: str, code: str | None = None) -> Response:
    """An error answer in the dialect of `path`. A full queue says when to come back; what cannot get better on a
    second try says so, since OpenAI's client repeats every 5xx."""
    kind = dialect(path)
    headers = {"Retry-After": "1"} if status == 503 else {"x-should-retry": "false"} if status >= 500 else {}
    if status in (408, 413):
        headers["Connection"] = "close"
    if kind == "text":
        return PlainTextResponse(message + "\n", status, headers=headers)
    text = json.dumps(error_body(kind, status, message, code), ensure_ascii=False)
    return Response(text, status, headers=headers, media_type="application/json; charset=utf-8")


def status_of(error: BaseException) -> int:
    """HTTP status of an error. What nests too deeply for us is the client's doing."""
    if isinstance(error, RecursionError):
        return 400
    return error.http_status if isinstance(error, EdgeLLMError) else 500


def text_of(error: BaseException, kind: str = "text") -> str:
    """What a client may read in dialect `kind`: our own messages as they are, anything else only as a number to look up
    in the log."""
    if isinstance(error, ContextLengthError) and kind in _TOO_LONG:
        return _TOO_LONG[kind].format(prompt=error.n_prompt, ctx=error.n_ctx, most=error.n_ctx - 1)
    if isinstance(error, QueueFullError):
        return "server busy, please try again.  maximum pending requests exceeded"
    if isinstance(error, EdgeLLMError):
        return str(error)
    if isinstance(error, RecursionError):
        return "the request is nested too deeply"
    reference = secrets.token_hex(4)
    _log.error("internal error %s", reference, exc_info=error)
    return f"internal error {reference}; the server's log has the details"


def code_of(error: BaseException) -> str | None:
    """OpenAI's machine-readable code, where it has one."""
    return "context_length_exceeded" if isinstance(error, ContextLengthError) else None


async def on_error(request: Request, error: Exception) -> Response:
    """Handler for every exception that a route let out before its answer began."""
    path = request.url.path
    return error_response(path, status_of(error), text_of(error, dialect(path)), code_of(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods: plain text, as Ollama answers them."""
    status = getattr(error, "status_code", 500)
    headers = getattr(error, "headers", None)
    return PlainTextResponse(_PLAIN.get(status, f"{status}"), status, headers=headers)
