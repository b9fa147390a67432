"""A session on a model that a running edgellm server has loaded already."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from edgellm.cli.opening import note
from edgellm.cli.session import Answer, Message
from edgellm.errors import ContextLengthError, RequestError

if TYPE_CHECKING:
    from edgellm.server.client import ServerClient

__all__ = ["ServerReply", "ServerSession", "find_server"]

_TOO_LONG = re.compile(r"(\d+) tokens\D+(\d+)")
_OPTION_NAMES = {"max_tokens": "num_predict"}


def find_server(model: str) -> ServerClient | None:
    """A client of the edgellm server of this user, if one runs and has `model` in memory; never waits for long."""
    from edgellm.server.settings import ServerSettings

    settings = ServerSettings.from_env()
    try:
        socket.create_connection((settings.host, settings.port), timeout=0.3).close()
    except OSError:
        return None  # No server: the usual case, found out without loading an HTTP client.
    from edgellm.server.client import ServerClient

    client = ServerClient()
    if {model.lower(), f"{model.lower()}:latest"} & client.loaded_by_edgellm():
        return client
    client.close()
    return None


class ServerReply:
    """An answer that streams from the server. Thinking that the server keeps apart comes between <think> marks."""

    def __init__(self, chunks: Iterator[dict[str, Any]], started: float):
        self._chunks = chunks
        self._started = started
        self._pieces: list[str] = []
        self._first: float | None = None
        self.answer = Answer("", "abort")

    def __iter__(self) -> Iterator[str]:
        thinking = False
        for chunk in self._chunks:
            message = chunk.get("message", {})
            for key, is_thought in (("thinking", True), ("content", False)):
                if text := message.get(key):
                    mark = "" if is_thought == thinking else ("<think>\n" if is_thought else "\n</think>\n\n")
                    thinking = is_thought
                    yield self._take(mark + text)
            if chunk.get("done"):
                self._finish(chunk)

    def _take(self, piece: str) -> str:
        self._first = self._first or time.perf_counter()
        self._pieces.append(piece)
        return piece

    def _finish(self, last: dict[str, Any]) -> None:
        n = last.get("eval_count", 0)
        self.answer = Answer(
            text="".join(self._pieces),
            finish_reason=last.get("done_reason", "stop"),
            prompt_tokens=last.get("prompt_eval_count", 0),
            cached_tokens=last.get("cached_tokens", 0),
            new_tokens=n,
            ttft_s=self._first - self._started if self._first else None,
            tpot_s=last.get("eval_duration", 0) / 1e9 / n if n else None,
            truncated=last.get("truncated"),
        )

    def cancel(self) -> None:
        """Break the connection, which stops the model; what came stays in `answer`."""
        close = getattr(self._chunks, "close", None)
        if close is not None:
            close()
        self.answer = Answer("".join(self._pieces), "abort")


class ServerSession:
    """Talks to the server over its own API; nothing is loaded here."""

    def __init__(self, name: str, client: ServerClient):
        self.name, self.load_s = name, 0.0
        # The server adds what is stored with the model.
        self.defaults: dict[str, Any] = {}
        self.system: str | None = None
        self.opening: list[Message] = []
        self._client = client
        note(f"using the server at {client.url}, which has {name} loaded (--local: load it here)")

    def reply(self, messages: list[Message], sampling: dict[str, Any], truncate: bool = False) -> ServerReply:
        """Answer the conversation; see `Session.reply`."""
        options = {_OPTION_NAMES.get(key, key): value for key, value in sampling.items() if value is not None}
        if "stop" in options:
            options["stop"] = list(options["stop"])
        started = time.perf_counter()
        chunks = self._client.chat(self.name, messages, options=options, truncate=truncate)
        try:
            first = next(chunks)
        except RequestError as error:
            if found := _TOO_LONG.search(str(error)):
                raise ContextLengthError(int(found[1]), int(found[2]), str(error)) from None
            raise
        return ServerReply(_again(first, chunks), started)

    def continue_text(self, prompt: str, sampling: dict[str, Any]) -> ServerReply:
        """Raw prompts are answered in this process only."""
        raise RequestError("--raw needs --local")

    def facts(self) -> dict[str, str]:
        """What `/show` prints."""
        shown = self._client.show(self.name)
        details = {key: str(value) for key, value in shown.get("details", {}).items() if value}
        return {"server": self._client.url, **details}

    def close(self) -> None:
        """Close the connection; the model stays loaded in the server."""
        self._client.close()


def _again(first: dict[str, Any], rest: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield first
    yield from rest
