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
from starlette.routing import Route

from edgellm.errors import EdgeLLMError
from edgellm.server import ollama_models, ollama_routes, openai_routes, pages
from edgellm.server.bridge import Bridge
from edgellm.server.catalog import Catalog, ModelRecord
from edgellm.server.errors import on_error, on_http_error
from edgellm.server.manager import ModelManager
from edgellm.server.metrics import CONTENT_TYPE, Metrics
from edgellm.server.observe import Observe
from edgellm.server.replies import JSONReply
from edgellm.server.security import Guard
from edgellm.server.settings import ServerSettings
from edgellm.server.state import ServerState

__all__ = ["create_app"]


def create_app(
    settings: ServerSettings,
    catalog: Catalog,
    load: Callable[[ModelRecord, int], Any],
    budget: int,
    preload: Sequence[ModelRecord] = (),
) -> Starlette:
    """The application. `load` makes an `LLM` of a record within so many bytes; `budget`: bytes for all models.
    The models of `preload` are loaded before the first request is taken."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        manager = ModelManager(settings, load, budget)
        engines = lambda: [(model.record.name, model.llm.stats()) for model in manager.loaded()]  # noqa: E731
        metrics = Metrics(engines, lambda: manager.waiting)
        bridge = Bridge(asyncio.get_running_loop())
        app.state.server = ServerState(settings, catalog, manager, metrics, bridge)
        try:
            for record in preload:
                (await manager.acquire(record)).release()
            yield
        finally:
            await manager.close()

    app = Starlette(
        routes=_routes(),
        lifespan=lifespan,
        middleware=[Middleware(Observe), Middleware(Guard, settings=settings)],
        exception_handlers={EdgeLLMError: on_error, HTTPException: on_http_error},
    )
    app.state.settings = settings
    app.router.redirect_slashes = False
    return app


def _routes() -> list[Route]:
    ollama, models, openai = ollama_routes, ollama_models, openai_routes
    return [
        Route("/", models.root),
        Route("/health", health),
        Route("/metrics", metrics_page),
        Route("/ui", pages.ui_root),
        Route("/ui/{name:path}", pages.ui_file),
        Route("/api/version", models.version),
        Route("/api/status", models.status),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.ps),
        Route("/api/show", models.show, methods=["POST"]),
        Route("/api/generate", ollama.generate, methods=["POST"]),
        Route("/api/chat", ollama.chat, methods=["POST"]),
        Route("/api/embed", ollama.embed_route, methods=["POST"]),
        Route("/api/embeddings", ollama.embeddings, methods=["POST"]),
        Route("/api/copy", models.copy, methods=["POST"]),
        Route("/api/delete", models.delete, methods=["DELETE"]),
        Route("/api/push", models.push, methods=["POST"]),
        Route("/api/me", models.me, methods=["POST"]),
        Route("/api/signout", models.me, methods=["POST"]),
        Route("/v1/models", openai.models),
        Route("/v1/models/{name:path}", openai.model),
        Route("/v1/chat/completions", openai.chat_completions, methods=["POST"]),
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/v1/embeddings", openai.embeddings, methods=["POST"]),
        Route("/v1/responses", openai.responses, methods=["POST"]),
        Route("/v1/messages", openai.messages, methods=["POST"]),
    ]


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
