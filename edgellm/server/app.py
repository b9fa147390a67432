"""The Starlette application: routes, checks before them, and the state they share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from edgellm.errors import EdgeLLMError
from edgellm.server import (
    anthropic_wire,
    ollama_models,
    ollama_routes,
    ollama_wire,
    openai_routes,
    openai_wire,
    pages,
    responses_wire,
    store_routes,
)
from edgellm.server.bridge import Bridge
from edgellm.server.catalog import Catalog, ModelRecord
from edgellm.server.errors import on_error, on_http_error
from edgellm.server.manager import ModelManager
from edgellm.server.metrics import CONTENT_TYPE, Metrics
from edgellm.server.observe import Observe
from edgellm.server.openapi import Endpoint, document
from edgellm.server.replies import JSONReply
from edgellm.server.security import Guard
from edgellm.server.settings import ServerSettings
from edgellm.server.state import ServerState

__all__ = ["create_app"]


def create_app(
    settings: ServerSettings,
    catalog: Catalog,
    load: Callable[[ModelRecord, int], tuple[Any, int]],
    budget: int,
    preload: Sequence[ModelRecord] = (),
    tidy: Callable[[], None] = lambda: None,
) -> Starlette:
    """The application. `load` makes an `LLM` of a record within so many bytes and says how many it keeps; `budget`:
    bytes for all models. The models of `preload` are loaded before the first request is taken; what kept one
    from it lies in the state's `failure`. `tidy` runs after each load and unload."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        manager = ModelManager(settings, load, budget, tidy=tidy)
        metrics = Metrics(manager)
        bridge = Bridge(asyncio.get_running_loop())
        app.state.server = ServerState(settings, catalog, manager, metrics, bridge)
        try:
            try:
                for record in preload:
                    (await manager.acquire(record)).release()
            except EdgeLLMError as error:
                app.state.server.failure = error
            yield
        finally:
            for pool in (app.state.server.downloads, app.state.server.embedders):
                pool.shutdown(wait=False, cancel_futures=True)
            await manager.close()

    app = Starlette(
        routes=[endpoint.route for endpoint in _endpoints()],
        lifespan=lifespan,
        middleware=[Middleware(Observe), Middleware(Guard, settings=settings)],
        exception_handlers={EdgeLLMError: on_error, HTTPException: on_http_error},
    )
    app.state.settings = settings
    app.router.redirect_slashes = False
    return app


def _endpoints() -> list[Endpoint]:
    ollama, models, store, openai = ollama_routes, ollama_models, store_routes, openai_routes
    return [
        Endpoint("GET", "/", models.root),
        Endpoint("GET", "/health", health),
        Endpoint("GET", "/metrics", metrics_page),
        Endpoint("GET", "/openapi.json", openapi_page),
        Endpoint("GET", "/ui", pages.ui_root),
        Endpoint("GET", "/ui/{name:path}", pages.ui_file),
        Endpoint("GET", "/api/version", models.version),
        Endpoint("GET", "/api/status", models.status),
        Endpoint("GET", "/api/tags", models.tags),
        Endpoint("GET", "/api/ps", models.ps),
        Endpoint("POST", "/api/show", models.show, models.NameBody),
        Endpoint("POST", "/api/generate", ollama.generate, ollama_wire.GenerateBody),
        Endpoint("POST", "/api/chat", ollama.chat, ollama_wire.ChatBody),
        Endpoint("POST", "/api/embed", ollama.embed_route, ollama.EmbedBody),
        Endpoint("POST", "/api/embeddings", ollama.embeddings, ollama.EmbeddingsBody),
        Endpoint("POST", "/api/copy", models.copy, models.CopyBody),
        Endpoint("DELETE", "/api/delete", models.delete, models.NameBody),
        Endpoint("POST", "/api/push", models.push, models.NameBody),
        Endpoint("POST", "/api/pull", store.pull, store.PullBody),
        Endpoint("POST", "/api/create", store.create, store.CreateBody),
        Endpoint("HEAD", "/api/blobs/{digest}", store.has_blob),
        Endpoint("POST", "/api/blobs/{digest}", store.put_blob),
        Endpoint("POST", "/api/me", models.me),
        Endpoint("POST", "/api/signout", models.me),
        Endpoint("GET", "/v1/models", openai.models),
        Endpoint("GET", "/v1/models/{name:path}", openai.model),
        Endpoint("POST", "/v1/chat/completions", openai.chat_completions, openai_wire.ChatBody),
        Endpoint("POST", "/v1/completions", openai.completions, openai_wire.CompletionBody),
        Endpoint("POST", "/v1/embeddings", openai.embeddings, openai.EmbeddingsBody),
        Endpoint("POST", "/v1/responses", openai.responses, responses_wire.ResponsesBody),
        Endpoint("POST", "/v1/responses/input_tokens", openai.input_tokens, responses_wire.ResponsesBody),
        Endpoint("POST", "/v1/messages", openai.messages, anthropic_wire.MessagesBody),
        Endpoint("POST", "/v1/messages/count_tokens", openai.count_tokens, anthropic_wire.CountBody),
    ]


async def openapi_page(request: Request) -> Response:
    """GET /openapi.json."""
    return JSONReply(document(_endpoints()))


async def health(request: Request) -> Response:
    """GET /health: 200 while the server takes work, 503 once it was told to stop."""
    state: ServerState = request.app.state.server
    loaded = [model.record.name for model in state.manager.loaded()]
    word = "stopping" if state.draining else "ok"
    return JSONReply({"status": word, "models": loaded}, 503 if state.draining else 200)


async def metrics_page(request: Request) -> Response:
    """GET /metrics, in Prometheus' text format."""
    page = await asyncio.to_thread(request.app.state.server.metrics.render)
    return Response(page, headers={"Content-Type": CONTENT_TYPE})
