"""The model manager against a stand-in for `LLM` and a clock that only moves when told to."""

from __future__ import annotations

import asyncio
import gc
import math
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from edgellm.errors import EdgeLLMError, MemoryBudgetError, QueueFullError
from edgellm.server.catalog import ModelRecord
from edgellm.server.heap import settle
from edgellm.server.manager import ModelManager
from edgellm.server.settings import ServerSettings

T = TypeVar("T")


@dataclass
class FakeClock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1e9


@dataclass
class StandIn:
    name: str
    size: int
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass
class Loader:
    """Loads after `delay` real seconds; needs `size` bytes."""

    size: int = 10
    delay: float = 0.0
    made: list[StandIn] = field(default_factory=list)

    def __call__(self, record: ModelRecord, room: int) -> tuple[StandIn, int]:
        time.sleep(self.delay)
        if self.size > room:
            raise MemoryBudgetError(f"needs {self.size} bytes, {room} are free")
        self.made.append(StandIn(record.name, self.size))
        return self.made[-1], self.size


def record(name: str) -> ModelRecord:
    return ModelRecord(name, Path(name), "0" * 64, 1, 0.0)


def run(work: Callable[[ModelManager, FakeClock, Loader], Awaitable[T]], loader: Loader | None = None, **how: Any) -> T:
    budget = how.pop("budget", 100)

    async def main() -> T:
        clock, load = FakeClock(), loader or Loader()
        manager = ModelManager(ServerSettings(**how), load, budget, clock)
        try:
            return await asyncio.wait_for(work(manager, clock, load), 10)
        finally:
            await manager.close()

    return asyncio.run(main())


async def quiet() -> None:
    for _ in range(20):
        await asyncio.sleep(0.002)


def test_requests_during_a_load_share_it() -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        leases = await asyncio.gather(*(manager.acquire(record("a")) for _ in range(5)))
        assert len(load.made) == 1
        assert {lease.loaded.users for lease in leases} == {5}

    run(work, Loader(delay=0.05))


def test_b20_the_clock_starts_when_the_last_request_ends() -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        first = await manager.acquire(record("a"), 1.0)
        second = await manager.acquire(record("a"), 1.0)
        clock.now += 3
        manager.sweep()
        first.release()
        clock.now += 3
        manager.sweep()
        await quiet()
        assert not load.made[0].closed, "a model in use was unloaded"
        second.release()
        clock.now += 0.9
        manager.sweep()
        await quiet()
        assert manager.expires_at(manager.loaded()[0]) == pytest.approx(clock.time() + 0.1)
        clock.now += 0.2
        manager.sweep()
        await quiet()
        assert load.made[0].closed and not manager.loaded()

    run(work)


def test_b20_without_the_field_the_default_comes_back() -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        (await manager.acquire(record("a"), math.inf)).release()
        assert manager.expires_at(manager.loaded()[0]) == math.inf
        (await manager.acquire(record("a"))).release()
        assert manager.expires_at(manager.loaded()[0]) == pytest.approx(clock.time() + 300)

    run(work)


def test_keep_alive_zero_unloads_after_the_answer_and_unload_waits_for_it() -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        (await manager.acquire(record("a"), 0.0)).release()
        await quiet()
        assert load.made[0].closed
        lease = await manager.acquire(record("b"))
        assert await manager.unload("b")
        assert not load.made[1].closed
        lease.release()
        await quiet()
        assert load.made[1].closed
        assert not await manager.unload("b")

    run(work)


def test_a_name_that_means_other_weights_is_loaded_again_once_its_requests_have_ended() -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        old, new = record("a"), replace(record("a"), path=Path("b"))
        lease = await manager.acquire(old)
        waiting = [asyncio.create_task(manager.acquire(new)) for _ in range(2)]
        await quiet()
        assert not any(task.done() for task in waiting) and not load.made[0].closed
        lease.release()
        leases = await asyncio.gather(*waiting)
        assert load.made[0].closed and len(load.made) == 2
        assert all(lease.llm is load.made[1] and lease.loaded.record == new for lease in leases)
        assert manager.loaded() == [leases[0].loaded]

    run(work)


def test_a_name_that_changes_during_a_load_gives_each_request_what_it_meant() -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        old, new = record("a"), replace(record("a"), path=Path("b"))
        first, second = (asyncio.create_task(manager.acquire(one)) for one in (old, new))
        lease = await first
        assert lease.loaded.record == old and not second.done()
        lease.release()
        later = await second
        assert later.loaded.record == new and [later.llm] == load.made[1:]

    run(work, Loader(delay=0.05))


def test_a_new_system_text_needs_no_load() -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        (await manager.acquire(record("a"))).release()
        lease = await manager.acquire(replace(record("a"), system="Be brief.", digest="1" * 64))
        assert len(load.made) == 1 and lease.loaded.record.system == "Be brief."

    run(work)


def test_the_least_recently_used_idle_model_makes_room() -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        for name in "abc":
            (await manager.acquire(record(name))).release()
            clock.now += 1
        busy = await manager.acquire(record("a"))
        (await manager.acquire(record("d"))).release()
        assert sorted(model.record.name for model in manager.loaded()) == ["a", "c", "d"]
        busy.release()

    run(work, Loader(size=30))


def test_a_load_waits_until_a_busy_model_can_make_room() -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        lease = await manager.acquire(record("a"))
        waiting = asyncio.create_task(manager.acquire(record("b")))
        await quiet()
        assert not waiting.done()
        lease.release()
        assert (await waiting).loaded.record.name == "b"
        assert load.made[0].closed

    run(work, Loader(size=80))


def test_a_load_that_waits_gets_the_room_of_a_model_that_goes_at_once() -> None:
    """The waiting load wakes before the other is let go, so it is tried once more in too little room."""

    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        lease = await manager.acquire(record("a"), 0.0)
        waiting = asyncio.create_task(manager.acquire(record("b")))
        await quiet()
        lease.release()
        assert (await waiting).loaded.record.name == "b" and load.made[0].closed

    run(work, Loader(size=80))


def test_a_model_that_cannot_be_closed_makes_room_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        (await manager.acquire(record("a"))).release()
        load.made[0].close = lambda: 1 // 0  # type: ignore[assignment, return-value]
        assert (await manager.acquire(record("b"))).loaded.record.name == "b"
        assert "closing model=a failed" in caplog.text

    run(work, Loader(size=80))


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        with pytest.raises(MemoryBudgetError, match="500 bytes, 100"):
            await manager.acquire(record("a"))

    run(work, Loader(size=500))


def test_too_many_waiting_for_a_load() -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        tasks = [asyncio.create_task(manager.acquire(record("a"))) for _ in range(3)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(item, QueueFullError) for item in done] == [False, False, True]

    run(work, Loader(delay=0.05), max_queue=2)


def test_a_client_that_leaves_does_not_stop_the_load() -> None:
    async def work(manager: ModelManager, clock: FakeClock, load: Loader) -> None:
        task = asyncio.create_task(manager.acquire(record("a")))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.sleep(0.1)
        assert [model.users for model in manager.loaded()] == [0]
        assert manager.waiting == 0

    run(work, Loader(delay=0.05))


def test_a_failed_load_is_told_to_all_and_tried_again() -> None:
    calls = []

    def load(entry: ModelRecord, room: int) -> tuple[StandIn, int]:
        calls.append(entry.name)
        if len(calls) == 1:
            raise EdgeLLMError("broken file")
        return StandIn(entry.name, 1), 1

    async def work(manager: ModelManager, clock: FakeClock, loader: Any) -> None:
        found = await asyncio.gather(*(manager.acquire(record("a")) for _ in range(2)), return_exceptions=True)
        assert [str(item) for item in found] == ["broken file", "broken file"]
        assert (await manager.acquire(record("a"))).loaded.record.name == "a"

    run(work, load)  # type: ignore[arg-type]


def test_a_model_that_was_let_go_is_gone_without_waiting_for_a_collection() -> None:
    """An engine is a ring of references, and `settle` has put it among the objects that are not looked at again."""
    gone: list[weakref.ref[StandIn]] = []

    class Ring(Loader):
        def __call__(self, record: ModelRecord, room: int) -> tuple[StandIn, int]:
            made, size = super().__call__(record, room)
            self.made.clear()
            made.itself = made  # type: ignore[attr-defined]
            gone.append(weakref.ref(made))
            return made, size

    async def main() -> None:
        manager = ModelManager(ServerSettings(), Ring(), 100, tidy=settle)
        (await manager.acquire(record("a"))).release()
        await manager.unload("a")
        await quiet()
        assert gc.get_freeze_count() > 0
        assert gone[0]() is None
        await manager.close()

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.unfreeze()
        gc.enable()
