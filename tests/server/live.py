"""A server in a thread of this process, on a free port, and a catalog of records given by the test."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from edgellm.errors import ModelNotFound
from edgellm.server.app import create_app
from edgellm.server.catalog import ModelDetails, ModelRecord
from edgellm.server.run import EdgeServer, bind
from edgellm.server.settings import ServerSettings
from tests.support.scripted import Script, scripted_llm


@dataclass
class GivenCatalog:
    """Records by name."""

    records: dict[str, ModelRecord] = field(default_factory=dict)

    def find(self, name: str) -> ModelRecord:
        for wanted in (name, f"{name}:latest"):
            if wanted in self.records:
                return self.records[wanted]
        raise ModelNotFound(f"no model {name!r}")

    def full_name(self, name: str) -> str:
        return name if ":" in name else f"{name}:latest"

    def list(self) -> list[ModelRecord]:
        return list(self.records.values())

    def details(self, record: ModelRecord) -> ModelDetails:
        info = {"general.architecture": "llama", "llama.context_length": 512, "tokenizer.ggml.tokens": ["a"] * 9}
        return ModelDetails(info, "llama", "1M", "F32", 1_000_000, 512, 64, "{{ messages }}", ("completion",))


@dataclass
class Live:
    """A running server."""

    url: str
    client: httpx.Client
    app: Any
    server: EdgeServer

    @property
    def state(self) -> Any:
        return self.app.state.server

    def llm(self) -> Any:
        """The only loaded model."""
        (model,) = self.state.manager.loaded()
        return model.llm

    def connect(self) -> socket.socket:
        """A bare connection; reads give up after ten seconds."""
        sock = socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])))
        sock.settimeout(10)
        return sock


@contextmanager
def live(catalog: Any, load: Callable[..., Any], budget: int = 1 << 33, **settings: Any) -> Iterator[Live]:
    """Serves until the block ends."""
    chosen = ServerSettings(**{"grace": 2.0, **settings})
    app = create_app(chosen, catalog, load, budget)
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    server = EdgeServer(app, chosen)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        for _ in range(200):
            if server.started:
                break
            thread.join(0.02)
        try:
            yield Live(url, client, app, server)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server did not stop"


def fake_record(name: str = "fake:latest", **fields: Any) -> ModelRecord:
    return ModelRecord(name, Path("fake.gguf"), "ab" * 32, 1234, 1_700_000_000.0, **fields)


@contextmanager
def live_scripted(
    script: Script | str = "Hello", *, record: ModelRecord | None = None, llm: Any = None, **settings: Any
) -> Iterator[Live]:
    """A server whose only model, `fake`, is the real engine over a script. `llm`: arguments of `scripted_llm`."""
    known = record or fake_record()
    catalog = GivenCatalog({known.name: known})
    with live(catalog, lambda *_: (scripted_llm(script, **(llm or {})), 1000), **settings) as running:
        yield running
