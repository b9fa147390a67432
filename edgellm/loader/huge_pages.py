"""Model files in huge pages, also when the page cache holds them in small ones.

A processor finds its way to 2 MB at once in a huge page; in small pages the kernels read weights up to a fifth slower.
A file that is read from the disk through our map comes in huge pages (see `file.py`), but one that another program has
just written stays in the cache as that program left it. So a thread brings the parts that have been read into huge
pages, 2 MB at a time; who reads there meanwhile waits for as long as that takes, 1 to 4 ms with a fast disk.

It takes a second or more for a gigabyte, and slows decoding down by a third to a half meanwhile. So it is done while no
request runs, or once the model has computed for so long that it would have been worth it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgellm.loader.mapped_pages import MappedPages, has_huge_pages

__all__ = ["HugePages"]

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_PATIENCE_S = 10e-9
"""Of computing, for each byte: decoding that long in small pages loses what bringing them into huge ones costs."""
_TRIES = 4
"""Of one range: a kernel that reads there at the wrong moment keeps its small pages alive, more often while it runs."""
_MOST_FAILURES = 4
"""In a row; then this file system has no huge pages, memory is fragmented, or another process uses the file."""
_SLOW_S = 0.025
"""For 2 MB: as slow as an old hard disk. Whatever it is, it is not worth the wait."""
_RESERVE = 256 << 20


class HugePages:
    """The files of an open model; `files`: path and map (uint8, the whole file) of each. `busy_s()`: seconds that the
    model has computed so far; `idle()`: whether no request runs. `available()`: bytes of memory that are free or hold
    cached files; nothing is done where it is less than the files' sizes and 256 MB.

    The maps stay in place until `close` returns, whoever else lets go of them. Results never depend on any of this."""

    def __init__(
        self,
        files: Sequence[tuple[Path, npt.NDArray[np.uint8]]],
        busy_s: Callable[[], float],
        idle: Callable[[], bool],
        available: Callable[[], int],
    ):
        self._files = [MappedPages(path, data) for path, data in files] if has_huge_pages() else []
        self._busy_s, self._idle, self._available = busy_s, idle, available
        size = sum(len(data) for _, data in files)
        self._needed, self._patience_s = size + _RESERVE, size * _PATIENCE_S
        self._tried: Counter[tuple[Path, int]] = Counter()
        self._failures = 0
        self._turn = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if any(file.n_ranges for file in self._files):
            # A daemon: a process that ends without closing its model does not wait for it.
            thread = threading.Thread(target=self._watch, name="edgellm-huge-pages", daemon=True)
            with suppress(RuntimeError):  # this process may have no more threads
                thread.start()
                self._thread = thread

    def settle(self) -> None:
        """Does at once what there is to do."""
        self._repair(while_idle=False)

    def share(self) -> float | None:
        """Of the bytes that this process has read, those in huge pages; None where there are none (another system)."""
        sums: list[tuple[int, int]] = []
        with self._turn, suppress(OSError):  # a container may hide /proc
            sums = [file.used_bytes() for file in self._files if file.n_ranges]
        used, huge = (sum(column) for column in zip(*sums, strict=True)) if sums else (0, 0)
        return huge / used if used else None

    def close(self) -> None:
        """Stops, at most one range later, and lets go of the maps. Idempotent."""
        self._stop.set()
        if self._thread:
            self._thread.join()
        with self._turn:
            for file in self._files:
                file.close()

    def _watch(self) -> None:
        """Looks again after each use: experts may be read for the first time, or memory be there by then."""
        seen = done = 0.0
        while self._failures < _MOST_FAILURES and not self._stop.wait(_LOOK_S):
            now = self._busy_s()
            rests, seen = now == seen and self._idle(), now
            patient = now < self._patience_s
            if now != done and (rests or not patient) and self._repair(while_idle=patient):
                done = now

    def _repair(self, while_idle: bool) -> bool:
        """False where a request came in between. OSError means that the file, or its part, cannot be read again."""
        with self._turn:
            for file in self._files:
                made = 0
                try:
                    for i in self._small_ranges(file):
                        if while_idle and not self._idle():
                            return False
                        made += self._make_huge(file, i)
                except OSError as error:
                    log.debug("%s: left in small pages: %s", file.path, error)
                    self._failures = _MOST_FAILURES
                finally:
                    if made:
                        log.debug("%s: %d MB are in huge pages now that were in small ones", file.path, 2 * made)
        return True

    def _small_ranges(self, file: MappedPages) -> Iterator[int]:
        """Ranges to do, as long as there is a point in it."""
        ranges = [i for i in file.small_ranges() if self._tried[file.path, i] < _TRIES]
        # In any order but the file's: who reads forwards would come upon the range of the moment again and again.
        random.Random(0).shuffle(ranges)
        for i in ranges:
            if self._stop.is_set() or self._failures >= _MOST_FAILURES or self._available() < self._needed:
                return
            yield i

    def _make_huge(self, file: MappedPages, i: int) -> bool:
        self._tried[file.path, i] += 1
        file.write_back(i)
        started = time.perf_counter()
        huge = file.make_huge(i)
        self._failures = 0 if huge and time.perf_counter() - started < _SLOW_S else self._failures + 1
        if self._failures == _MOST_FAILURES:
            log.debug("%s: the rest is left in small pages", file.path)
        return huge
