"""The way of every generation request: model found and leased, answers started, first delta awaited, reply made."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgellm.errors import ModelNotFound
from edgellm.server.catalog import ModelRecord
from edgellm.server.embedding import Embedded, embed
from edgellm.server.errors import ShuttingDown
from edgellm.server.frames import Framer
from edgellm.server.generation import Generation
from edgellm.server.job import Job
from edgellm.server.prepare import prepare
from edgellm.server.replies import FrameStream, JSONReply, attended
from edgellm.server.state import ServerState

__all__ = ["answer", "count_prompt", "embed_inputs", "find_model", "refuse_while_draining"]


async def answer(request: Request, jobs: Sequence[Job], framer: Framer, *, stream: bool) -> Response:
    """The reply to a request's jobs, all for one model, in the framer's dialect. Raises what goes wrong before the
    first byte."""
    state: ServerState = request.app.state.server
    refuse_while_draining(state)
    return await attended(request, _answer(state, jobs, framer, stream))


async def _answer(state: ServerState, jobs: Sequence[Job], framer: Framer, stream: bool) -> Response:
    started = time.perf_counter()
    record = await find_model(state, jobs[0].model)
    lease = await state.manager.acquire(record, jobs[0].keep_alive)
    generation = await Generation.start(lease, jobs, state.bridge, state.metrics, started)
    state.running.add(generation)
    generation.on_close = state.running.discard
    try:
        deltas = generation.deltas()
        if not stream:
            whole = [delta async for delta in deltas]
            generation.close()
            return JSONReply(framer.whole(whole))
        first = await deltas.__anext__()
    except BaseException:
        generation.close()
        raise
    return FrameStream(generation, first, deltas, framer)


async def count_prompt(request: Request, job: Job) -> int:
    """Tokens of the prompt that `job` makes; nothing is answered. Raises what is wrong with the job, and
    ContextLengthError for a prompt that would not fit."""
    state: ServerState = request.app.state.server
    refuse_while_draining(state)
    record = await find_model(state, job.model)
    lease = await attended(request, state.manager.acquire(record, job.keep_alive))
    try:
        work = asyncio.get_running_loop().run_in_executor(None, prepare, job, lease.loaded)
        return len((await attended(request, work)).ids)
    finally:
        lease.release()


async def find_model(state: ServerState, name: str, missing: str = "model '{}' not found") -> ModelRecord:
    """The stored model that a client's name means. `missing`: the words each route has for a name that is unknown."""
    try:
        return await asyncio.to_thread(state.catalog.find, name)
    except ModelNotFound:
        raise ModelNotFound(missing.replace("{}", name)) from None


def refuse_while_draining(state: ServerState) -> None:
    """New work is refused once the server was told to stop."""
    if state.draining:
        raise ShuttingDown("the server is shutting down")


async def embed_inputs(
    request: Request,
    name: str,
    inputs: Sequence[str | Sequence[int]],
    *,
    keep_alive: float | None = None,
    missing: str = "model '{}' not found",
    **how: Any,
) -> Embedded:
    """Vectors from the model of that name; `how`: arguments of `embed`. Ends when the client leaves."""
    state: ServerState = request.app.state.server
    refuse_while_draining(state)
    record = await find_model(state, name, missing)
    lease = await attended(request, state.manager.acquire(record, keep_alive))
    stop = threading.Event()
    try:
        work = functools.partial(embed, lease.llm, inputs, stop=stop, **how)
        found = await attended(request, asyncio.get_running_loop().run_in_executor(state.embedders, work))
    finally:
        stop.set()
        lease.release()
    found.load_s = lease.load_s
    return found
