"""A whole file in parts, over several connections, checked while it arrives.

Worker threads fetch parts and write them; a journal thread syncs the data and then notes the parts (journal.py); the
calling thread computes the SHA-256 of the whole file in order, from memory where a part has just arrived and from the
file otherwise, and reports progress. Nothing that came is thrown away but for parts whose digest is found wrong.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import httpx

from edgellm.errors import CancelledError, PullError
from edgellm.hub.fetch import TRIES, Fetcher, RangeIgnored
from edgellm.hub.journal import Geometry, Partial, part_digest
from edgellm.hub.web import connection_error

__all__ = ["download", "whole_digest"]

_KEPT_BYTES = 32 << 20
"""Parts kept in memory until the hash comes by."""
_GROW_S = 0.5
_FAST = 150e6
"""Bytes per second from which more connections only cost CPU."""
_SYNC_S = 1.0
"""Longest that arrived bytes wait for company before they are synced."""

Progress = Callable[[int], None]


def download(fetcher: Fetcher, partial: Partial, digest: str, progress: Progress, connections: int = 0) -> str:
    """Brings the file and gives its SHA-256 (hex); `digest`: the right one, or empty where nobody knows it.

    A wrong digest: parts that the disk has damaged are fetched again at once. Where the parts are as they came, the
    origin sent them wrong: PullError with both digests, the data stays aside and is marked, and the next call fetches
    the parts again, replaces those that differ, and is done as soon as the whole is right.
    """
    if partial.bad:
        return _repair(fetcher, partial, digest, progress, connections)
    todo = [part for part in range(partial.geometry.n_parts) if part not in partial.done]
    found = _Transfer(fetcher, partial, todo, progress, connections).run()
    if digest and found != digest:
        damaged = _damaged(partial)
        if damaged:
            partial.forget(damaged)
            found = _Transfer(fetcher, partial, damaged, progress, connections).run()
    if digest and found != digest:
        partial.mark_bad(True)
        raise wrong_digest(partial.label, digest, found)
    return found


def most_unsynced(geometry: Geometry) -> int:
    """Bytes that may be written and not yet noted: what a kill costs besides the ranges under way. Small next to the
    file, and large enough that the disk is not kept busy with syncs."""
    share = 200 if geometry.size < 1 << 30 else 64
    return min(max(geometry.size // share, geometry.part_size, 2 << 20), 128 << 20)


def wrong_digest(label: str, wanted: str, found: str) -> PullError:
    """Says what the origin sent, and what comes next."""
    return PullError(
        f"{label}: digest mismatch: want sha256:{wanted}, got sha256:{found}; "
        "the data is kept aside, pull again to fetch and replace the parts that differ"
    )


def whole_digest(partial: Partial) -> str:
    """SHA-256 of the data file as it is."""
    digest = hashlib.sha256()
    for part in range(partial.geometry.n_parts):
        digest.update(partial.read(part))
    return digest.hexdigest()


def _damaged(partial: Partial) -> list[int]:
    """Parts whose bytes on disk are not those that arrived."""
    return [part for part, known in partial.done.items() if part_digest(partial.read(part)) != known]


def _repair(fetcher: Fetcher, partial: Partial, digest: str, progress: Progress, connections: int) -> str:
    partial.forget(_damaged(partial))
    suspects = deque(range(partial.geometry.n_parts))
    found = ""
    while suspects:
        transfer = _Transfer(fetcher, partial, suspects, progress, connections, compare=True)
        transfer.run(hash_all=False)
        found = whole_digest(partial)
        if found == digest:
            partial.mark_bad(False)
            return found
        suspects = transfer.todo
    raise wrong_digest(partial.label, digest, found or whole_digest(partial))


class _Transfer:
    """One round: fetches the parts of `todo`. With `compare` only parts that differ from the file are written, and the
    first of them ends the round."""

    def __init__(
        self,
        fetcher: Fetcher,
        partial: Partial,
        todo: Iterable[int],
        progress: Progress,
        connections: int,
        compare: bool = False,
    ):
        self.fetcher = fetcher
        self.partial = partial
        self.geometry = partial.geometry
        self.todo = deque(todo)
        self.compare = compare
        self._most = connections or (4 if self.geometry.size < 1 << 30 else 8)
        self._fewest = connections or 2
        self._threads: list[threading.Thread] = []
        self._streaming = False
        self._progress = progress
        self._changed = threading.Condition()
        self._have = set() if compare else set(partial.done)
        self._kept: dict[int, bytearray] = {}
        self._kept_bytes = 0
        self._written: list[tuple[int, str]] = []
        self._unsynced = 0
        self._most_unsynced = most_unsynced(self.geometry)
        self._arrived = 0 if compare else partial.done_bytes
        self._looked = (time.monotonic(), self._arrived)
        self._reported = 0
        self._working = 0
        self._differs = False
        self._error: BaseException | None = None

    def run(self, hash_all: bool = True) -> str:
        """Fetches, syncs, notes; the digest of the whole file, unless `hash_all` is off."""
        journal = threading.Thread(target=self._guard, args=(self._note_parts, False), daemon=True)
        if self.todo and not self.fetcher.location().ranges:
            self._start(self._stream)
        else:
            for _ in range(min(self._fewest, len(self.todo))):
                self._start(self._work)
        journal.start()
        try:
            found = self._hash() if hash_all else ""
            self._wait(lambda: self._working <= 0 and not self._unsynced)
        except BaseException as error:  # Ctrl-C too: what came is noted before it goes on
            with self._changed:
                self._error = self._error or error
            raise
        finally:
            for thread in self._threads:
                thread.join(timeout=2.0 if self._error else None)
            with self._changed:
                self._working = 0
                self._changed.notify_all()
            journal.join()
        self._report()
        return found

    def _start(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._working += 1
        self._threads.append(threading.Thread(target=self._guard, args=(work,), daemon=True))
        self._threads[-1].start()

    def _grow(self) -> None:
        """One connection more every half second, while the line and not this machine is what limits."""
        now, (then, before) = time.monotonic(), self._looked
        if now - then < _GROW_S or len(self._threads) >= self._most or self._streaming:
            return
        slow = (self._arrived - before) / (now - then) < _FAST
        self._looked = (now, self._arrived)
        with self._changed:  # the journal thread stays as long as somebody works
            if slow and self._working > 0 and self.todo and not self._error and not self._differs:
                self._start(self._work)

    def _guard(self, work: Callable[[], None], counts: bool = True) -> None:
        """Runs a thread's work; its error ends the whole round."""
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._working -= counts
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._error or self._unsynced <= self._most_unsynced)
                if self._error or self._differs or not self.todo:
                    return
                part = self.todo.popleft()
            block = bytearray(self.geometry.length(part))
            try:
                self._fetch(part, block)
            except RangeIgnored:
                with self._changed:
                    self.todo.appendleft(part)
                    if self._working > 1:
                        return  # the last worker to notice reads the file as one stream
                self._stream()
                return
            self._deliver(part, block)

    def _fetch(self, part: int, block: bytearray) -> None:
        place = 0

        def arrived(piece: memoryview) -> None:
            nonlocal place
            if self._error:
                raise CancelledError("stopped; what came is kept")
            block[place : place + len(piece)] = piece
            place += len(piece)
            self._arrived += len(piece)

        self.fetcher.read_range(*self.geometry.span(part), arrived)

    def _deliver(self, part: int, block: bytearray) -> None:
        """Writes a part that is whole, and hands it to the journal and to the hash."""
        differs = self.compare and (part not in self.partial.done or self.partial.read(part) != block)
        if differs or not self.compare:
            self.partial.write(self.geometry.span(part)[0], block)
        digest = part_digest(block)
        with self._changed:
            self._have.add(part)
            if differs or not self.compare:
                self._written.append((part, digest))
                self._unsynced += len(block)
            self._differs = self._differs or differs
            if not self.compare and self._kept_bytes + len(block) <= _KEPT_BYTES:
                self._kept[part] = block
                self._kept_bytes += len(block)
            self._changed.notify_all()

    def _stream(self) -> None:
        """The whole file as one answer, from a server without ranges: parts that are here already pass by."""
        self._streaming = True
        wanted = set(self.todo)
        failures, best = 0, -1
        while wanted:
            part, place = 0, 0
            block = bytearray(self.geometry.length(0))

            def arrived(piece: memoryview) -> None:
                nonlocal part, place, block
                if self._error:
                    raise CancelledError("stopped; what came is kept")
                while piece:
                    n = min(len(piece), len(block) - place)
                    block[place : place + n] = piece[:n]
                    piece, place = piece[n:], place + n
                    if place < len(block):
                        return
                    if part in wanted:
                        wanted.discard(part)
                        self._arrived += len(block)
                        self._deliver(part, block)
                    part, place = part + 1, 0
                    block = bytearray(self.geometry.length(part) if part < self.geometry.n_parts else 0)

            try:
                self.fetcher.read_all(arrived)
            except httpx.HTTPError as error:
                failures = 1 if part > best else failures + 1
                best = max(best, part)
                if failures > TRIES:
                    raise connection_error(self.fetcher.location().url, error) from None
                self.fetcher.sleep(2.0 ** (failures - 1) * self.fetcher.retry_s)
        self.todo.clear()

    def _note_parts(self) -> None:
        """The journal thread: sync first, then say so. Goes on after an error until what was written is noted."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._written or self._working <= 0)
                self._changed.wait_for(self._worth_a_sync, timeout=_SYNC_S)
                parts, self._written = self._written, []
            if not parts:
                return
            self.partial.sync()
            self.partial.note(parts)
            with self._changed:
                self._unsynced -= sum(self.geometry.length(part) for part, _ in parts)
                self._changed.notify_all()

    def _worth_a_sync(self) -> bool:
        return self._unsynced * 4 >= self._most_unsynced or self._working <= 0 or self._error is not None

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for part in range(self.geometry.n_parts):
            self._wait(lambda part=part: part in self._have)  # type: ignore[misc]
            with self._changed:
                block: bytearray | bytes | None = self._kept.pop(part, None)
                self._kept_bytes -= len(block) if block is not None else 0
            digest.update(self.partial.read(part) if block is None else block)
            self._report()
        return digest.hexdigest()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Waits for a condition, reports progress, and raises what went wrong elsewhere."""
        with self._changed:
            while not ready():
                if self._error is not None:
                    raise self._error
                if self.fetcher.stop.is_set():
                    raise CancelledError("stopped; what came is kept")
                self._changed.wait(0.1)
                self._report()

    def _report(self) -> None:
        self._grow()
        self._reported = max(self._reported, min(self._arrived, self.geometry.size))
        self._progress(self._reported)
