"""A small client of a running edgellm (or Ollama) server, for the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx

from edgellm.errors import EdgeLLMError, ModelNotFound, RequestError
from edgellm.server.settings import ServerSettings

__all__ = ["ServerClient", "server_url"]


def server_url(host: str | None = None, port: int | None = None) -> str:
    """Where the server of this user would be: the given address, or EDGELLM_HOST / OLLAMA_HOST, or the default."""
    settings = ServerSettings.from_env()
    name = host or settings.host
    if name in ("0.0.0.0", "::", "[::]"):
        name = "127.0.0.1"
    if ":" in name and not name.startswith("["):
        name = f"[{name}]"
    return f"http://{name}:{port or settings.port}"


class ServerClient:
    """Requests to one server; a context manager. Errors are EdgeLLMErrors with the server's own words."""

    def __init__(self, url: str | None = None, api_key: str | None = None):
        self.url = url or server_url()
        key = api_key or os.environ.get("EDGELLM_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # trust_env off: a proxy variable must not send requests for this machine elsewhere.
        timeout = httpx.Timeout(None, connect=2.0)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def loaded(self) -> list[dict[str, Any]]:
        """The models in the server's memory, as /api/ps shows them."""
        return list(self._json("GET", "/api/ps")["models"])

    def loaded_by_edgellm(self) -> set[str]:
        """Names in the memory of a server that is edgellm, in lower case; none where another program answers."""
        try:
            reply = self._http.get("/health", timeout=1.0)
            return {str(name).lower() for name in reply.json()["models"]} if reply.status_code == 200 else set()
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return set()

    def show(self, model: str) -> dict[str, Any]:
        """What /api/show says of a model."""
        return self._json("POST", "/api/show", {"model": model})

    def unload(self, model: str) -> None:
        """Lets the model go once its running requests have ended."""
        self._json("POST", "/api/generate", {"model": model, "keep_alive": 0, "stream": False})

    def chat(self, model: str, messages: list[dict[str, Any]], **fields: Any) -> Iterator[dict[str, Any]]:
        """The objects of a streamed /api/chat; the last one has `done` true. Closing the iterator stops the model."""
        return self._stream("/api/chat", {"model": model, "messages": messages, **fields})

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("POST", path, json={**body, "stream": True}) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise _error(reply)
                for line in reply.iter_lines():
                    value = json.loads(line)
                    if "error" in value:
                        raise EdgeLLMError(str(value["error"]))
                    yield value
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            reply = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if reply.status_code != 200:
            raise _error(reply)
        value = reply.json()
        assert isinstance(value, dict)
        return value

    def _unreachable(self, error: httpx.HTTPError) -> EdgeLLMError:
        if isinstance(error, httpx.ConnectError):
            return EdgeLLMError(f"no server answers at {self.url}; start one with `edgellm serve`")
        return EdgeLLMError(f"the server at {self.url} broke the connection: {error}")


def _error(reply: httpx.Response) -> EdgeLLMError:
    """The server's own words as the kind of error its status stands for."""
    try:
        message = str(reply.json()["error"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {reply.status_code}: {reply.text[:200].strip()}"
    if reply.status_code == 404:
        return ModelNotFound(message)
    return RequestError(message) if reply.status_code == 400 else EdgeLLMError(message)
