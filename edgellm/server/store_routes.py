"""Ollama's routes that bring models into the store: pull, create, and blobs that clients upload."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgellm.errors import EdgeLLMError, GGUFError, ModelNotFound, PullError, RequestError
from edgellm.hub import create as hub_create
from edgellm.hub import pull as hub_pull
from edgellm.hub.disk import check_room, scratch
from edgellm.hub.manifest import MODEL, Layer, valid_digest
from edgellm.hub.modelfile import ROLES, Modelfile
from edgellm.hub.sources import NotThere, check_source
from edgellm.hub.store import Store
from edgellm.server.body import Wire, body_parts, parse, read_json
from edgellm.server.catalog import ModelRecord
from edgellm.server.errors import text_of
from edgellm.server.frames import NDJSON, ndjson
from edgellm.server.options import parse_options
from edgellm.server.replies import JSONReply, attended, gone
from edgellm.server.serving import find_model
from edgellm.server.state import ServerState

__all__ = ["CreateBody", "PullBody", "create", "has_blob", "pull", "put_blob"]

_log = logging.getLogger("edgellm.server")
Work = Callable[[Callable[[dict[str, Any]], None], threading.Event], Any]
_PIECE = 4 << 20
"""Bytes of an upload that are written at once."""


class SourceFailed(EdgeLLMError):
    """The place that a model is pulled from failed, not this server: a client need not try again at once."""

    http_status = 424


class PullBody(Wire):
    """POST /api/pull."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    insecure: bool | None = None


class CreateBody(Wire):
    """POST /api/create."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    from_: str | None = Field(None, alias="from")
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    quantize: str | None = None
    template: str | None = None
    license: str | list[str] | None = None
    system: str | None = None
    parameters: dict[str, Any] | None = None
    messages: list[dict[str, Any]] | None = None


async def pull(request: Request) -> Response:
    """POST /api/pull."""
    body = parse(PullBody, await read_json(request))
    name = body.model or body.name
    if not name:
        raise RequestError("model is required")
    state: ServerState = request.app.state.server
    options = hub_pull.PullOptions(insecure=bool(body.insecure))
    try:
        check_source(name, options.insecure)
    except RequestError as error:
        raise RequestError(str(error).replace("add --insecure", 'send "insecure": true')) from None

    def work(tell: Callable[[dict[str, Any]], None], stop: threading.Event) -> None:
        try:
            hub_pull.pull(name, state.catalog.store, options, tell, stop)
        except NotThere:
            raise
        except ModelNotFound as error:  # a repository without a file for the tag: its message lists what there is
            raise ModelNotFound(f"pull model manifest: {error}") from None
        except PullError as error:
            raise SourceFailed(str(error)) from None

    return await _report(request, work, stream=body.stream is not False)


async def create(request: Request) -> Response:
    """POST /api/create."""
    body = parse(CreateBody, await read_json(request))
    name = body.model or body.name
    if not name:
        raise RequestError("model is required")
    state: ServerState = request.app.state.server
    name, store = state.catalog.full_name(name), state.catalog.store
    base = await find_model(state, body.from_) if body.from_ else None
    modelfile = _modelfile(body, base, store)

    def work(tell: Callable[[dict[str, Any]], None], stop: threading.Event) -> None:
        try:
            # No relative path leads to a file from there: what a client names is never a path.
            hub_create.create(name, modelfile, Path(os.devnull), store, lambda line: tell({"status": line}))
        except GGUFError as error:
            raise RequestError(str(error)) from None
        tell({"status": "success"})

    return await _report(request, work, stream=body.stream is not False)


def _modelfile(body: CreateBody, base: ModelRecord | None, store: Store) -> Modelfile:
    """The body as what `edgellm create` reads. Raises RequestError for what cannot be made here."""
    if body.adapters:
        raise RequestError("adapters are not supported; create the model from merged weights")
    if body.quantize:
        raise RequestError("quantize is not supported; create the model from a file that is quantised already")
    if base is None and not body.files:
        raise RequestError("neither 'from' or 'files' was specified")
    parse_options(body.parameters, source="create")
    license_texts = [body.license] if isinstance(body.license, str) else body.license or []
    return Modelfile(
        source=_source(base) if base is not None else _uploaded(body.files or {}, store),
        params={name: value for name, value in (body.parameters or {}).items() if value is not None},  # null: unset
        template=body.template,
        system=body.system,
        messages=[_turn(number, message) for number, message in enumerate(body.messages or ())],
        license=license_texts,
    )


def _turn(number: int, message: dict[str, Any]) -> dict[str, str]:
    """A stored turn. Raises RequestError for what no Modelfile could say, and most templates could not render."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise RequestError(f"messages.{number} must have a role and a content")
    if role.lower() not in ROLES:
        raise RequestError(f"messages.{number}: the role of a stored turn is one of {', '.join(ROLES)}, not {role!r}")
    return {"role": role.lower(), "content": content}


def _source(base: ModelRecord) -> str:
    return str(base.path) if base.origin == "file" else base.name


def _uploaded(files: dict[str, str], store: Store) -> str:
    """The path of the one file that was uploaded before as a blob."""
    models = {name: digest for name, digest in files.items() if name.lower().endswith(".gguf")}
    if len(models) != 1 or len(files) != 1:
        raise RequestError("files must name exactly one .gguf file (join the files of a split model first)")
    digest = next(iter(models.values()))
    path = store.blob_path(digest) if valid_digest(digest) else None
    if path is None or not path.is_file():
        raise RequestError(f"blob {digest!r} is not here; upload it to /api/blobs/ first")
    return str(path)


async def _report(request: Request, work: Work, *, stream: bool) -> Response:
    """Runs `work` in a thread and streams the objects it tells, or answers with the last one."""
    reports = _Reports(request.app.state.server, work)
    if stream:
        return _ReportStream(reports)
    last: dict[str, Any] = {}

    async def to_the_end() -> None:
        async for value in reports:
            last.clear()
            last.update(value)

    try:
        await attended(request, to_the_end())
    finally:
        reports.stop()
    return JSONReply(last)


class _Reports:
    """The objects that a piece of work tells from its thread, as they come; raises what the work raises."""

    def __init__(self, state: ServerState, work: Work):
        self._stop = threading.Event()
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(value: dict[str, Any] | None) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, value)

        def run() -> None:
            try:
                work(tell, self._stop)
            finally:
                tell(None)

        self._done = loop.run_in_executor(state.downloads, run)
        # Where the client has left nobody waits for it, and asyncio would log how it ended as a bug.
        self._done.add_done_callback(lambda done: done.cancelled() or done.exception())

    def stop(self) -> None:
        """Asks the work to end; what a download has brought is kept."""
        self._stop.set()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        while (value := await self._queue.get()) is not None:
            yield value
        await self._done


class _ReportStream(Response):
    """Streams reports as lines; an error becomes the last line, since the first was sent long before."""

    def __init__(self, reports: _Reports):
        self.reports = reports
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends lines until the work ends or the client leaves."""
        sending = asyncio.ensure_future(self._send_all(send))
        left = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({sending, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.reports.stop()
            left.cancel()
            sending.cancel()
            await asyncio.gather(sending, left, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", NDJSON.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for value in self.reports:
                await send({"type": "http.response.body", "body": ndjson(value), "more_body": True})
        except Exception as error:
            await send({"type": "http.response.body", "body": ndjson({"error": text_of(error)}), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _digest(request: Request) -> str:
    """The digest in the path, in its colon form. Raises RequestError: nothing else may become a file name."""
    text = str(request.path_params["digest"])
    digest = text.replace("sha256-", "sha256:", 1) if text.startswith("sha256-") else text
    if not valid_digest(digest):
        raise RequestError("invalid digest format")
    return digest


async def has_blob(request: Request) -> Response:
    """HEAD /api/blobs/DIGEST."""
    store = request.app.state.server.catalog.store
    found = await asyncio.to_thread(store.blob_path(_digest(request)).is_file)
    return Response(status_code=200 if found else 404)


async def put_blob(request: Request) -> Response:
    """POST /api/blobs/DIGEST: raw bytes, checked while they are written."""
    store, digest = request.app.state.server.catalog.store, _digest(request)
    if await asyncio.to_thread(store.blob_path(digest).is_file):
        return Response(status_code=200)
    check_room(store.root, int(request.headers.get("content-length", 0)), "the upload")
    with ExitStack() as opened:
        out, path = await asyncio.to_thread(opened.enter_context, scratch(store.partial, "upload-"))
        found, size = await _receive(request, out, store.root)
        if found != digest:
            raise RequestError(f'digest mismatch, expected "{digest}", got "{found}"')
        await asyncio.to_thread(store.adopt, path, Layer(MODEL, digest, size))
    return Response(status_code=201)


async def _receive(request: Request, out: Any, root: Path) -> tuple[str, int]:
    """Writes the body; its digest and size. Raises what `body_parts` does, and EdgeLLMError for the disk."""
    sha, size, waiting = hashlib.sha256(), 0, bytearray()

    def write(data: bytes) -> None:
        check_room(root, len(data), "the upload")  # its length may not have been told
        try:
            sha.update(data)
            out.write(data)
        except OSError as error:
            raise EdgeLLMError(f"the upload can't be written: {error.strerror}") from None

    async for part in body_parts(request, request.app.state.settings.body_timeout):
        waiting += part
        size += len(part)
        while len(waiting) >= _PIECE:
            await asyncio.to_thread(write, bytes(waiting[:_PIECE]))
            del waiting[:_PIECE]
    await asyncio.to_thread(write, bytes(waiting))
    await asyncio.to_thread(_to_disk, out)
    return f"sha256:{sha.hexdigest()}", size


def _to_disk(out: Any) -> None:
    out.flush()
    os.fsync(out.fileno())
