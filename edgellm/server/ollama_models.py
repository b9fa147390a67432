"""Ollama's routes about models: what is stored, what is loaded, what a file holds."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from edgellm.errors import EdgeLLMError, RequestError
from edgellm.hub.modelfile import Modelfile, format_modelfile
from edgellm.server.body import Wire, parse, read_json
from edgellm.server.catalog import ModelDetails, ModelRecord
from edgellm.server.durations import local_stamp
from edgellm.server.metrics import measured_bytes
from edgellm.server.replies import JSONReply
from edgellm.server.serving import find_model
from edgellm.server.state import ServerState

__all__ = ["OLLAMA_VERSION", "CopyBody", "NameBody", "copy", "delete", "me"]
__all__ += ["ps", "push", "root", "show", "status", "tags", "version"]

_log = logging.getLogger("edgellm.server")
OLLAMA_VERSION = "0.33.0"
"""The version of Ollama whose API this is; clients compare it with the one they need."""


class NameBody(Wire):
    """A body that names one model, by the new key or the old one."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None

    @property
    def wanted(self) -> str:
        """The name that was sent, or empty."""
        return self.model or self.name or ""


class CopyBody(Wire):
    """POST /api/copy."""

    source: str = ""
    destination: str = ""


async def root(request: Request) -> Response:
    """GET /: what Ollama's command line looks for before it does anything."""
    return PlainTextResponse("Ollama is running")


async def version(request: Request) -> Response:
    """GET /api/version."""
    return JSONReply({"version": OLLAMA_VERSION})


async def status(request: Request) -> Response:
    """GET /api/status: there is no cloud here."""
    return JSONReply({"cloud": {"disabled": True, "source": "config"}})


async def me(request: Request) -> Response:
    """POST /api/me and /api/signout: there are no accounts here."""
    return JSONReply({"error": "unauthorized"}, 401)


async def tags(request: Request) -> Response:
    """GET /api/tags: the stored models, newest first."""
    catalog = request.app.state.server.catalog

    def entries() -> list[dict[str, Any]]:
        found = []
        for record in catalog.list():
            try:
                details = catalog.details(record)
            except EdgeLLMError as error:
                _log.warning("%s is left out of the list: %s", record.name, error)
                continue
            entry = {**_entry(record, details), "modified_at": local_stamp(record.modified_at)}
            found.append({**entry, "capabilities": list(details.capabilities)})
        return found

    return JSONReply({"models": await asyncio.to_thread(entries)})


async def ps(request: Request) -> Response:
    """GET /api/ps: the loaded models with the bytes they hold, the one that stays longest first."""
    state: ServerState = request.app.state.server
    models = []
    for loaded in state.manager.loaded():
        expires = state.manager.expires_at(loaded)
        try:
            details = await asyncio.to_thread(state.catalog.details, loaded.record)
        except EdgeLLMError:  # the file was removed, which ends nothing that is in memory
            details = None
        entry = _entry(loaded.record, details)
        entry["size"] = await asyncio.to_thread(measured_bytes, loaded)
        entry["size_vram"] = 0
        entry["expires_at"] = local_stamp(expires if expires < 1e11 else math.inf)
        if (llm := loaded.llm) is not None:  # else it was let go meanwhile
            models.append({**entry, "context_length": llm.ctx})
    return JSONReply({"models": models})


def _entry(record: ModelRecord, details: ModelDetails | None) -> dict[str, Any]:
    return {
        "name": record.name,
        "model": record.name,
        "size": record.size,
        "digest": record.digest,
        "details": {} if details is None else _details(record, details),
    }


def _details(record: ModelRecord, details: ModelDetails) -> dict[str, Any]:
    return {
        "parent_model": record.parent,
        "format": "gguf",
        "family": details.family,
        "families": [details.family],
        "parameter_size": details.parameter_size,
        "quantization_level": details.quantization_level,
        "context_length": details.context_length,
        "embedding_length": details.embedding_length,
    }


async def show(request: Request) -> Response:
    """POST /api/show."""
    body = parse(NameBody, await read_json(request))
    if not body.wanted:
        raise RequestError("model is required")
    catalog = request.app.state.server.catalog
    missing = f"model '{catalog.full_name(body.wanted)}' not found"
    record = await find_model(request.app.state.server, body.wanted, missing)
    details = await asyncio.to_thread(catalog.details, record)
    metadata = await asyncio.to_thread(catalog.metadata, record) if body.verbose else details.metadata
    reply: dict[str, Any] = {
        "modelfile": _modelfile(record),
        "parameters": parameters_text(record.params),
        "template": record.shown_template or record.template or details.chat_template,
        "details": _details(record, details),
        "model_info": model_info(details, metadata),
        "capabilities": list(details.capabilities),
        "modified_at": local_stamp(record.modified_at),
    }
    if record.license:
        reply["license"] = "\n".join(record.license)
    if record.system:
        reply["system"] = record.system
    if record.messages:
        reply["messages"] = list(record.messages)
    if request.headers.get("user-agent", "").startswith("GitHubCopilotChat/"):
        # This client shows the basename as the model's name, and expects the one it asked for.
        reply["model_info"]["general.basename"] = body.wanted
    return JSONReply(reply)


def model_info(details: ModelDetails, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The file's metadata by key, with the keys that clients count on."""
    hidden = ("general.name", "tokenizer.chat_template")
    info = {key: value for key, value in metadata.items() if key not in hidden}
    info.setdefault("general.architecture", details.family)
    info.setdefault("general.parameter_count", details.parameter_count)
    info.setdefault("general.basename", metadata.get("general.name", details.family))
    return info


def parameters_text(params: Mapping[str, Any]) -> str:
    """Option lines as Ollama's clients parse them: the name padded to 30, a space, the value; strings quoted."""
    lines = []
    for name, value in params.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            text = json.dumps(item, ensure_ascii=False) if isinstance(item, (str, bool)) else str(item)
            lines.append(f"{name:<30} {text}")
    return "\n".join(lines)


def _modelfile(record: ModelRecord) -> str:
    """A Modelfile that makes this model again."""
    params, messages = dict(record.params), list(record.messages)
    model = Modelfile(record.name, params, record.template, record.system, messages, list(record.license))
    return "# Modelfile generated by edgellm\n" + format_modelfile(model)


async def copy(request: Request) -> Response:
    """POST /api/copy."""
    body = parse(CopyBody, await read_json(request))
    if not body.source or not body.destination:
        raise RequestError("source and destination are required")
    await find_model(request.app.state.server, body.source, 'model "{}" not found')
    await asyncio.to_thread(request.app.state.server.catalog.copy, body.source, body.destination)
    return Response(status_code=200)


async def delete(request: Request) -> Response:
    """DELETE /api/delete, with a JSON body. A loaded model is let go first."""
    body = parse(NameBody, await read_json(request))
    state: ServerState = request.app.state.server
    record = await find_model(state, body.wanted)
    await asyncio.to_thread(state.catalog.delete, body.wanted)
    await state.manager.unload(record.name)
    return Response(status_code=200)


async def push(request: Request) -> Response:
    """POST /api/push: not offered."""
    return JSONReply({"error": "edgellm does not push models; use `ollama push` or a hub's own tools"}, 501)
