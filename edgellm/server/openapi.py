"""The served OpenAPI document: every endpoint with the body it reads, from the same wire types that check requests."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgellm import __version__
from edgellm.server.body import Wire

__all__ = ["Endpoint", "document"]

_REFS = "#/components/schemas/{prefix}{{model}}"


@dataclass(frozen=True)
class Endpoint:
    """One path and method. `body`: the type its JSON body is checked against."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    body: type[Wire] | None = None

    @property
    def route(self) -> Route:
        """For Starlette, which adds HEAD to GET."""
        return Route(self.path, self.handler, methods=[self.method])


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1 of the API endpoints (pages and files are left out)."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for endpoint in endpoints:
        if endpoint.path.startswith("/ui") or endpoint.path == "/openapi.json":
            continue
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path, schemas)
    info = {"title": "edgellm", "version": __version__, "description": "Ollama, OpenAI and Anthropic endpoints."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _operation(endpoint: Endpoint, path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    summary = (endpoint.handler.__doc__ or "").strip().partition("\n")[0]
    operation: dict[str, Any] = {"summary": summary, "responses": {"default": {"description": "See http errors."}}}
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _schema(endpoint, path, schemas)}},
        }
    return operation


def _schema(endpoint: Endpoint, path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """The body's schema; the types inside it go to `schemas` under names of their own."""
    assert endpoint.body is not None
    prefix = re.sub(r"\W+", "_", path).strip("_") + "_"
    schema = endpoint.body.model_json_schema(ref_template=_REFS.format(prefix=prefix))
    for name, inner in schema.pop("$defs", {}).items():
        schemas[prefix + name] = inner
    return schema
