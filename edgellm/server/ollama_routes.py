"""Ollama's generation and embedding routes."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgellm.errors import RequestError
from edgellm.server.body import Wire, parse, read_json
from edgellm.server.durations import NS, keep_alive_seconds
from edgellm.server.embedding import Embedded
from edgellm.server.job import Job
from edgellm.server.ollama_wire import ChatBody, GenerateBody, OllamaChunks, chat_job, done_object, generate_job
from edgellm.server.options import parse_options
from edgellm.server.replies import JSONReply, attended
from edgellm.server.serving import answer, embed_inputs, find_model, refuse_while_draining
from edgellm.server.state import ServerState

__all__ = ["EmbedBody", "EmbeddingsBody", "chat", "embed_route", "embeddings", "generate"]


class EmbedBody(Wire):
    """POST /api/embed."""

    model: str = ""
    input: Any = None
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


class EmbeddingsBody(Wire):
    """POST /api/embeddings, the old form."""

    model: str = ""
    prompt: str | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


async def chat(request: Request) -> Response:
    """POST /api/chat."""
    body = parse(ChatBody, await read_json(request))
    if not body.model:
        raise RequestError("model is required")
    job = chat_job(body)
    if not body.messages:
        return await _load_or_unload(request, job, chat=True)
    return await answer(request, [job], OllamaChunks(body.model, chat=True), stream=body.stream is not False)


async def generate(request: Request) -> Response:
    """POST /api/generate."""
    body = parse(GenerateBody, await read_json(request))
    job = generate_job(body)
    if not body.prompt and not body.suffix:
        return await _load_or_unload(request, job, chat=False)
    framer = OllamaChunks(body.model, chat=False, raw=bool(body.raw))
    return await answer(request, [job], framer, stream=body.stream is not False)


async def _load_or_unload(request: Request, job: Job, *, chat: bool) -> Response:
    """An empty request: brings the model into memory, or with keep_alive 0 lets it go. Always one plain object."""
    state: ServerState = request.app.state.server
    refuse_while_draining(state)
    record = await find_model(state, job.model)
    if job.keep_alive == 0:
        await state.manager.unload(record.name)
        return JSONReply(done_object(job.model, "unload", chat))
    lease = await attended(request, state.manager.acquire(record, job.keep_alive))
    lease.release()
    return JSONReply(done_object(job.model, "load", chat))


async def embed_route(request: Request) -> Response:
    """POST /api/embed: one vector of length 1 per text, in order."""
    started = time.perf_counter()
    body = parse(EmbedBody, await read_json(request))
    texts = [body.input] if isinstance(body.input, str) else [] if body.input is None else body.input
    if not isinstance(texts, list) or any(not isinstance(text, str) for text in texts):
        raise RequestError("invalid input type: input must be a string or a list of strings")
    found = await _embed(request, body, texts, truncate=body.truncate is not False, dimensions=body.dimensions)
    reply: dict[str, Any] = {"model": body.model, "embeddings": found.vectors.tolist()}
    numbers = {
        "total_duration": int((time.perf_counter() - started) * NS),
        "load_duration": int(found.load_s * NS),
        "prompt_eval_count": found.n_tokens,
    }
    reply.update({name: number for name, number in numbers.items() if number})
    return JSONReply(reply)


async def embeddings(request: Request) -> Response:
    """POST /api/embeddings: the old form, one text."""
    body = parse(EmbeddingsBody, await read_json(request))
    if not body.model:
        raise RequestError("model is required")
    found = await _embed(request, body, [body.prompt] if body.prompt else [], truncate=True, dimensions=None)
    return JSONReply({"embedding": found.vectors[0].tolist() if len(found.vectors) else []})


async def _embed(
    request: Request, body: EmbedBody | EmbeddingsBody, texts: list[str], *, truncate: bool, dimensions: int | None
) -> Embedded:
    return await embed_inputs(
        request,
        body.model,
        texts,
        keep_alive=keep_alive_seconds(body.keep_alive),
        missing='model "{}" not found, try pulling it first',
        truncate=truncate,
        dimensions=dimensions,
        num_ctx=parse_options(body.options).num_ctx,
    )
