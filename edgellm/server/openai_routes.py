"""OpenAI's and Anthropic's routes."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from edgellm.errors import RequestError
from edgellm.server.anthropic_wire import (
    CountBody,
    MessageFrames,
    MessagesBody,
    messages_job,
    model_info,
    model_list,
)
from edgellm.server.body import Whole, Wire, parse, read_json
from edgellm.server.catalog import ModelRecord
from edgellm.server.openai_frames import ChatFrames, CompletionFrames
from edgellm.server.openai_wire import ChatBody, CompletionBody, chat_job, completion_jobs
from edgellm.server.replies import JSONReply
from edgellm.server.responses_frames import ResponseFrames
from edgellm.server.responses_wire import ResponsesBody, responses_job
from edgellm.server.serving import answer, count_prompt, embed_inputs, find_model

__all__ = ["EmbeddingsBody", "chat_completions", "completions", "embeddings"]
__all__ += ["messages", "model", "models", "responses"]


class EmbeddingsBody(Wire):
    """POST /v1/embeddings."""

    model: str = ""
    input: str | list[Any] | None = None
    encoding_format: str | None = None
    dimensions: Whole | None = None


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    body = parse(ChatBody, await read_json(request))
    _need_model(body.model)
    frames = ChatFrames(body.model, include_usage=body.include_usage)
    return await answer(request, [chat_job(body)], frames, stream=bool(body.stream))


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    body = parse(CompletionBody, await read_json(request))
    _need_model(body.model)
    jobs = completion_jobs(body)
    frames = CompletionFrames(body.model, include_usage=body.include_usage, n_prompts=len(jobs))
    return await answer(request, jobs, frames, stream=bool(body.stream))


async def responses(request: Request) -> Response:
    """POST /v1/responses."""
    body = parse(ResponsesBody, await read_json(request))
    _need_model(body.model)
    job = responses_job(body)
    text_format = body.text.format if body.text else None
    frames = ResponseFrames(job, body.instructions, body.tools, text_format, body.metadata)
    return await answer(request, [job], frames, stream=bool(body.stream))


async def input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens."""
    body = parse(ResponsesBody, await read_json(request))
    _need_model(body.model)
    count = await count_prompt(request, responses_job(body))
    return JSONReply({"object": "response.input_tokens", "input_tokens": count})


async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    body = parse(MessagesBody, await read_json(request))
    frames = MessageFrames(body.model, stops=body.stop_sequences or ())
    return await answer(request, [messages_job(body)], frames, stream=bool(body.stream))


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    body = parse(CountBody, await read_json(request))
    return JSONReply({"input_tokens": await count_prompt(request, messages_job(body))})


async def embeddings(request: Request) -> Response:
    """POST /v1/embeddings: texts or token ids, as floats or base64 of little-endian float32."""
    body = parse(EmbeddingsBody, await read_json(request))
    _need_model(body.model)
    encoding = body.encoding_format or "float"
    if encoding not in ("float", "base64"):
        raise RequestError(f"encoding_format must be float or base64, not {encoding!r}")
    found = await embed_inputs(request, body.model, _inputs(body.input), truncate=False, dimensions=body.dimensions)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding)}
        for index, vector in enumerate(found.vectors)
    ]
    usage = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
    return JSONReply({"object": "list", "data": data, "model": body.model, "usage": usage})


def _inputs(value: str | list[Any] | None) -> list[Any]:
    """One text, several, one list of token ids, or several."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise RequestError("input: at least one text is needed")
    if all(isinstance(item, str) for item in value):
        return value
    if _are_ids(value):
        return [value]
    if all(isinstance(item, list) and item and _are_ids(item) for item in value):
        return value
    raise RequestError("input must be a string, a list of strings, a list of token ids, or a list of such lists")


def _are_ids(value: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _encoded(vector: Any, encoding: str) -> Any:
    if encoding == "float":
        return vector.tolist()
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


async def models(request: Request) -> Response:
    """GET /v1/models, in Anthropic's shape for its clients, which say so in a header."""
    records = await asyncio.to_thread(request.app.state.server.catalog.list)
    if "anthropic-version" in request.headers:
        return JSONReply(model_list([model_info(record.name, record.modified_at) for record in records]))
    return JSONReply({"object": "list", "data": [_model(record.name, record) for record in records]})


async def model(request: Request) -> Response:
    """GET /v1/models/NAME, where NAME may hold slashes."""
    name = request.path_params["name"]
    record = await find_model(request.app.state.server, name)
    if "anthropic-version" in request.headers:
        return JSONReply(model_info(name, record.modified_at))
    return JSONReply(_model(name, record))


def _model(name: str, record: ModelRecord) -> dict[str, Any]:
    owner = record.name.rpartition("/")[0] or "library"
    return {"id": name, "object": "model", "created": int(record.modified_at), "owned_by": owner}


def _need_model(name: str) -> None:
    if not name:
        raise RequestError("model is required")
