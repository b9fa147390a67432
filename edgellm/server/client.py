"""A small client of a running edgellm (or Ollama) server, for the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx

from edgellm.errors import EdgeLLMError, ModelNotFound, RequestError
from edgellm.server.settings import ServerSettings, http_address

__all__ = ["ServerClient", "server_url"]


def server_url(host: str | None = None, port: int | None = None) -> str:
    """Where the server of this user would be: the given address, or EDGELLM_HOST / OLLAMA_HOST, or the default."""
    settings = ServerSettings.from_env().at(host, port)
    everywhere = settings.host in ("0.0.0.0", "::")
    return http_address("127.0.0.1" if everywhere else settings.host, settings.port)


class ServerClient:
    """Requests to one server; a context manager. Errors are EdgeLLMErrors with the server's own words."""

    def __init__(self, url: str | None = None, api_key: str | None = None):
        self.url = url or server_url()
        key = api_key or os.environ.get("EDGELLM_API_KEY")
        if key and not (key.isascii() and key.isprintable()):
            raise RequestError("an API key holds printable ASCII characters only")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=2.0)
        try:
            # trust_env off: a proxy variable must not send requests for this machine elsewhere.
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)
        except httpx.InvalidURL as error:
            raise RequestError(f"{self.url!a} is no server's address: {str(error)!a}") from None

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def loaded(self) -> list[dict[str, Any]]:
        """The models in the server's memory, as /api/ps shows them."""
        models = self._json("GET", "/api/ps").get("models")
        if not isinstance(models, list):
            raise self._no_such_server()
        return models

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
                    if value.get("done"):
                        return
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        except (ValueError, AttributeError, TypeError):
            raise self._no_such_server() from None
        raise EdgeLLMError(f"the server at {self.url} stopped before the answer's end")

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            reply = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if reply.status_code != 200:
            raise _error(reply)
        try:
            value = reply.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise self._no_such_server()
        return value

    def _no_such_server(self) -> EdgeLLMError:
        return EdgeLLMError(f"what answers at {self.url} is neither edgellm nor Ollama")

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
