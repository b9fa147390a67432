"""Which models are in memory: loaded once for all who ask, kept while used, let go when their time is over."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

from edgellm.chat.grammar import GrammarCompiler
from edgellm.chat.tools import ReplyStyle
from edgellm.errors import EdgeLLMError, MemoryBudgetError, QueueFullError
from edgellm.server.catalog import ModelRecord
from edgellm.server.settings import ServerSettings

__all__ = ["Clock", "Lease", "LoadedModel", "ModelManager"]

_log = logging.getLogger("edgellm.server")
T = TypeVar("T")


class LoadTimeout(EdgeLLMError):
    """A model that is not in memory in time: a slow disk, or busy models that make no room."""

    http_status = 503


class Clock(Protocol):
    """Where times come from; tests bring their own."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...

    def time(self) -> float:
        """Unix seconds."""
        ...


@dataclass(eq=False)
class LoadedModel:
    """A model in memory. Times are the manager's monotonic seconds."""

    record: ModelRecord
    llm: Any
    reserved: int
    """Bytes of the budget that are its own."""
    load_s: float
    keep_alive: float
    users: int = 0
    last_used: float = 0.0
    deadline: float = math.inf
    """When it is let go, once nobody uses it."""

    def close(self) -> None:
        """Let go of everything. The model can't be used after this."""
        llm, self.llm = self.llm, None
        self.__dict__.pop("grammars", None)
        self.__dict__.pop("replies", None)
        try:
            llm.close()
        except EdgeLLMError as error:
            _log.error("closing model=%s failed: %s", self.record.name, error)
        except Exception as error:  # it is gone all the same, and others wait for its room
            _log.error("closing model=%s failed", self.record.name, exc_info=error)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles constraints for its vocabulary."""
        return GrammarCompiler(self.llm.tokenizer)

    @cached_property
    def replies(self) -> ReplyStyle:
        """How its family writes thoughts and tool calls."""
        return ReplyStyle(self.llm.template.source, self.llm.tokenizer)


@dataclass(eq=False)
class Lease:
    """The right to use a loaded model. `load_s` is the time this user waited for it: a moment where it was
    loaded already, never nothing, since clients of Ollama count on a `load_duration` in every reply."""

    manager: ModelManager
    loaded: LoadedModel
    load_s: float
    _open: bool = field(default=True, repr=False)

    @property
    def llm(self) -> Any:
        """The model's `LLM`."""
        return self.loaded.llm

    def release(self) -> None:
        """Gives the model back; the keep-alive countdown starts when the last user has done so."""
        if self._open:
            self._open = False
            self.manager.give_back(self.loaded)


class ModelManager:
    """Loads, lends and unloads models. `load` makes an `LLM` within so many bytes and says how many it keeps; `tidy`
    runs when one was loaded or let go.

    All methods run in the event loop; loading and closing run in one worker thread, one model at a time, so that two
    loads never count the same free memory.
    """

    def __init__(
        self,
        settings: ServerSettings,
        load: Callable[[ModelRecord, int], tuple[Any, int]],
        budget: int,
        clock: Clock = time,
        tidy: Callable[[], None] = lambda: None,
    ):
        self.settings = settings
        self.budget = budget
        self.clock = clock
        self._load, self._tidy = load, tidy
        self._models: dict[str, LoadedModel] = {}
        self._loading: dict[str, asyncio.Task[LoadedModel]] = {}
        self._waiting = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="edgellm-load")
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def loaded(self) -> list[LoadedModel]:
        """Models in memory, the one that stays longest first."""
        return sorted(list(self._models.values()), key=lambda model: -self.expires_at(model))

    def expires_at(self, model: LoadedModel) -> float:
        """Unix time at which a model is let go if no request comes; infinity for never."""
        if model.users:
            return self.clock.time() + model.keep_alive
        return self.clock.time() + model.deadline - self.clock.monotonic()

    @property
    def waiting(self) -> int:
        """Requests that wait for a load."""
        return self._waiting

    async def acquire(self, record: ModelRecord, keep_alive: float | None = None) -> Lease:
        """Lends the model, loading it first where it must: also where the name has come to mean other weights.

        Raises QueueFullError when too many wait for a load, MemoryBudgetError when it can never fit, and what the
        loader raises.
        """
        started = self.clock.monotonic()
        model = self._models.get(record.name)
        if model is None or not _same_weights(model.record, record):
            model = await self._wait_for(record)
        model.record = record  # its system text or its parameters may be new
        model.users += 1
        model.keep_alive = self.settings.keep_alive if keep_alive is None else keep_alive
        return Lease(self, model, self.clock.monotonic() - started)

    async def _wait_for(self, record: ModelRecord) -> LoadedModel:
        if self._waiting >= self.settings.max_queue:
            raise QueueFullError(f"{self._waiting} requests wait for a model to load already; try again later")
        self._waiting += 1
        try:
            while True:
                task = self._loading.get(record.name)
                if task is None:
                    task = asyncio.create_task(self._bring(record))
                    self._loading[record.name] = task
                    task.add_done_callback(_retrieved)
                # Shielded: a client that leaves must not stop the load that others wait for.
                model = await asyncio.wait_for(asyncio.shield(task), self.settings.load_timeout)
                if self._models.get(record.name) is model and _same_weights(model.record, record):
                    return model
        except asyncio.TimeoutError:
            raise LoadTimeout(f"{record.name} did not load within {self.settings.load_timeout:g} s") from None
        finally:
            self._waiting -= 1

    async def _bring(self, record: ModelRecord) -> LoadedModel:
        try:
            return await self._load_in_room(record)
        finally:
            del self._loading[record.name]

    async def _load_in_room(self, record: ModelRecord) -> LoadedModel:
        """Loads one model, making room among the idle ones. What the name meant before ends its requests first."""
        while (old := self._models.get(record.name)) is not None:
            await self._close_when_idle(old)
        while len(self._models) >= self.settings.max_loaded:
            await self._make_room()
        started = self.clock.monotonic()
        while True:
            alone = not self._models  # asked now: another may be let go while this one is tried
            room = self.budget - sum(model.reserved for model in self._models.values())
            try:
                llm, reserved = await self._in_worker(self._load, record, room)
                break
            except MemoryBudgetError:
                if alone:
                    raise
                if self._models:
                    await self._make_room()
        now = self.clock.monotonic()
        stay = self.settings.keep_alive
        model = LoadedModel(record, llm, reserved, now - started, stay, last_used=now, deadline=now + stay)
        self._models[record.name] = model
        _log.info("loaded model=%s seconds=%.2f", record.name, model.load_s)
        return model

    async def _in_worker(self, work: Callable[..., T], *args: Any) -> T:
        """Load or close a model, then tidy up."""

        def both() -> T:
            result = work(*args)
            self._tidy()
            return result

        return await asyncio.get_running_loop().run_in_executor(self._worker, both)

    async def _make_room(self) -> None:
        """Unloads the idle model that was used longest ago, or waits until one is idle."""
        idle = [model for model in self._models.values() if model.users == 0]
        if idle:
            await self._close(min(idle, key=lambda model: model.last_used))
            return
        await self._next_change()

    async def _close_when_idle(self, model: LoadedModel) -> None:
        while model.users:
            await self._next_change()
        await self._close(model)

    async def _next_change(self) -> None:
        """Waits until a model is idle or gone."""
        self._changed.clear()
        await self._changed.wait()

    def give_back(self, model: LoadedModel) -> None:
        """One user less. See `Lease.release`."""
        model.users -= 1
        if model.users == 0:
            model.last_used = self.clock.monotonic()
            model.deadline = model.last_used + model.keep_alive
            self._changed.set()
            self.sweep()

    async def unload(self, name: str) -> bool:
        """Lets a model go: now if it is idle, else when its last request ends. Whether it was loaded."""
        model = self._models.get(name)
        if model is None:
            return False
        model.keep_alive = 0.0
        if model.users == 0:
            await self._close(model)
        return True

    def sweep(self) -> None:
        """Unloads every idle model whose time is over, and sets the timer for the next."""
        now = self.clock.monotonic()
        idle = [model for model in self._models.values() if model.users == 0]
        for model in idle:
            if model.deadline <= now:
                task = asyncio.create_task(self._close(model))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        upcoming = [model.deadline - now for model in idle if now < model.deadline < math.inf]
        if upcoming:
            self._timer = asyncio.get_running_loop().call_later(min(upcoming) + 0.001, self.sweep)

    async def _close(self, model: LoadedModel) -> None:
        try:
            if self._models.get(model.record.name) is model:
                del self._models[model.record.name]
                _log.info("unloading model=%s", model.record.name)
                await self._in_worker(model.close)
        finally:
            self._changed.set()  # whatever became of it, or loads would wait for ever

    async def close(self) -> None:
        """Ends all loads and lets every model go."""
        if self._timer is not None:
            self._timer.cancel()
        loads = list(self._loading.values())
        for task in loads:
            task.cancel()
        await asyncio.gather(*loads, *self._closing, return_exceptions=True)
        for model in list(self._models.values()):
            await self._close(model)
        self._worker.shutdown(wait=True, cancel_futures=True)


def _same_weights(one: ModelRecord, other: ModelRecord) -> bool:
    """Whether a model that was loaded for the one serves the other too. Files in a store never change."""
    return (one.path, one.template, one.draft) == (other.path, other.template, other.draft)


def _retrieved(task: asyncio.Task[LoadedModel]) -> None:
    """Marks a failed load as seen, for the case that all who waited for it have left."""
    if not task.cancelled():
        task.exception()
