"""One range of a remote file: how each kind of failure is met.

A cut line or a server error is tried again after 1, 2, 4 ... seconds, `TRIES` times without a byte of progress; a line
that is silent for `stall_s` is dropped and opened again; 429 and 503 wait as long as `Retry-After` says, for all
connections; 401, 403, 404 and 410 from a signed address ask for a fresh one.
"""

from __future__ import annotations

import email.utils
import threading
import time
from collections.abc import Callable, Iterator

import httpx

from edgellm.errors import CancelledError, PullError
from edgellm.hub.ranges import Ranges, Stalled
from edgellm.hub.web import Answer, Location, Unreachable, Web, connection_error, shown

__all__ = ["Fetcher", "RangeIgnored", "RateLimit"]

TRIES = 6
STALLS = 10
"""Times in a row that a silent line is opened again before the pull gives up (it can be resumed)."""
RENEWALS = 3
LONGEST_WAIT = 600.0
_RENEW = (401, 403, 404, 410, 301, 302, 303, 307, 308)
"""Answers of an address that worked before: it has expired or moved."""


class RangeIgnored(Exception):
    """The server answers a range with the whole file."""


class RateLimit:
    """At most `rate` bytes per second over all connections."""

    def __init__(self, rate: float):
        self.rate = rate
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def wait_s(self, n: int) -> float:
        """Books n bytes and says how long to wait for them."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + n / self.rate
            return self._free_at - now


class Fetcher:
    """Reads ranges of one file from several threads. `retry_s` scales all waiting (tests make it small)."""

    def __init__(
        self,
        web: Web,
        locate: Callable[[], Location | Answer],
        size: int,
        stop: threading.Event,
        *,
        limit: RateLimit | None = None,
        retry_s: float = 1.0,
    ):
        self.web = web
        self.size = size
        self.stop = stop
        self._locate = locate
        self._limit = limit
        self.retry_s = retry_s
        self._lock = threading.Lock()
        self._ranges = Ranges(web.client, web.timeout)
        self._location: Location | None = None
        self._not_before = 0.0

    def location(self) -> Location:
        """The current address of the bytes, asked for with patience. PullError when there is none."""
        failures = renewals = 0
        while True:
            self._pause()
            try:
                with self._lock:
                    if self._location is None:
                        self._location = self._find()
                    return self._location
            except Unreachable as error:
                problem: PullError = error
            except _Refused as refused:
                if self._told_to_wait(refused.answer):
                    continue
                problem = refused.as_error()
                if refused.answer.status in (401, 403, 410) and renewals < RENEWALS:
                    renewals += 1  # a signed address may be dead on arrival
                    continue
                if refused.answer.status < 500:
                    raise problem from None
            failures += 1
            self._wait_after(failures, problem)

    def read_range(self, start: int, stop: int, arrived: Callable[[memoryview], None]) -> None:
        """Gives the bytes start..stop-1 in order to `arrived`, whatever it takes. PullError when it cannot be done."""
        failures = stalls = renewals = 0
        place = start
        while place < stop:
            before = place
            self._pause()
            location = self.location()
            try:
                for block in self._one_try(location, place, stop):
                    arrived(block)
                    place += len(block)
                if place == stop:
                    return
                problem = PullError(f"{shown(location.url)} ended after {place - start} of {stop - start} bytes")
            except Stalled:
                stalls = 0 if place > before else stalls + 1
                if stalls >= STALLS:
                    raise PullError(f"{shown(location.url)} sends nothing; what came is kept, pull again") from None
                continue
            except Unreachable as error:
                problem = error
            except _Refused as refused:
                problem = refused.as_error()
                if refused.answer.status in _RENEW:
                    renewals = 0 if place > before else renewals + 1
                    if renewals > RENEWALS:
                        raise problem from None
                    self._forget(location)
                    continue
                if self._told_to_wait(refused.answer):
                    continue
                if refused.answer.status < 500:
                    raise problem from None
            failures = 1 if place > before else failures + 1
            self._wait_after(failures, problem)

    def read_all(self, arrived: Callable[[memoryview], None]) -> None:
        """The whole file in one answer, for a server without ranges. Raises httpx.HTTPError where the line is cut."""
        location = self.location()
        with self.web.whole(location) as response:
            if response.status_code != 200:
                raise PullError(f"{shown(location.url)} answers {response.status_code}")
            left = self.size
            for block in response.iter_raw():
                self._slow_down(len(block))
                if len(block) > left:
                    raise PullError(f"{shown(location.url)} sends more than the {self.size} bytes expected")
                left -= len(block)
                arrived(memoryview(block))
            if left:
                raise httpx.RemoteProtocolError(f"{shown(location.url)} ended after {self.size - left} bytes")

    def read_beginning(self, n: int) -> bytearray:
        """The first n bytes from a server without ranges: the answer is dropped once they came."""
        location = self.location()
        data = bytearray()
        try:
            with self.web.whole(location) as response:
                if response.status_code != 200:
                    raise PullError(f"{shown(location.url)} answers {response.status_code}")
                for block in response.iter_raw():
                    data += block
                    if len(data) >= n:
                        return data[:n]
        except httpx.HTTPError as error:
            raise connection_error(location.url, error) from None
        raise PullError(f"{shown(location.url)} ended after {len(data)} of {self.size} bytes")

    def sleep(self, seconds: float) -> None:
        """Waits, but not longer than the pull lives."""
        if self.stop.wait(max(seconds, 0.0)):
            raise CancelledError("stopped; what came is kept")

    def _find(self) -> Location:
        found = self._locate()
        if isinstance(found, Answer):
            raise _Refused(found)
        if found.size is not None and found.size != self.size:
            raise PullError(f"{shown(found.url)} has {found.size} bytes, but {self.size} are expected")
        return found

    def _forget(self, old: Location) -> None:
        """Has a fresh address asked for, unless another thread did so already."""
        with self._lock:
            if self._location is old:
                self._location = None

    def _wait_after(self, failures: int, problem: PullError) -> None:
        if failures > TRIES:
            raise PullError(f"{problem}; gave up after {TRIES} tries, what came is kept: pull again to go on")
        self.sleep(min(2.0 ** (failures - 1), 60.0) * self.retry_s)

    def _one_try(self, location: Location, start: int, stop: int) -> Iterator[memoryview]:
        with self._ranges.open(location, start, stop) as answer:
            if answer.status == 200 and (start, stop) != (0, self.size):
                raise RangeIgnored
            if answer.status not in (200, 206):
                body = next(answer.blocks, b"")[:2000]
                raise _Refused(Answer(answer.status, body, dict(answer.headers), location.url))
            told = answer.headers.get("content-range", "")
            if answer.status == 206 and told.replace(" ", "").lower().startswith("bytes"):
                first, _, total = told.lower().replace("bytes", "").strip(" =").partition("/")
                if first.partition("-")[0].strip() != str(start) or total.strip() not in ("*", str(self.size)):
                    raise PullError(f"{shown(location.url)} sent the range {ascii(told)[:60]}, not the one asked for")
            left = stop - start
            for block in answer.blocks:
                if left == 0:
                    return
                self._slow_down(len(block))
                yield memoryview(block)[:left]
                left -= min(left, len(block))

    def _slow_down(self, n: int) -> None:
        if self.stop.is_set():
            raise CancelledError("stopped; what came is kept")
        if self._limit is not None:
            self.sleep(self._limit.wait_s(n))

    def _pause(self) -> None:
        if self.stop.is_set():
            raise CancelledError("stopped; what came is kept")
        wait = self._not_before - time.monotonic()
        if wait > 0:
            self.sleep(wait)

    def _told_to_wait(self, answer: Answer) -> bool:
        """Books the wait that a server asks for with Retry-After; an error where it is longer than anyone waits."""
        told = answer.headers.get("retry-after", "")
        if answer.status not in (429, 503) or not told:
            return False
        if told.isascii() and told.strip().isdigit():
            seconds = float(told.strip()[:9])
        else:
            try:
                seconds = email.utils.parsedate_to_datetime(told).timestamp() - time.time()
            except (ValueError, TypeError, OverflowError):
                return False
        if seconds > LONGEST_WAIT:
            raise PullError(
                f"{shown(answer.url)} limits requests ({answer.status}) and asks to wait {seconds:.0f} s; "
                "what came is kept, pull again later"
            )
        self._not_before = max(self._not_before, time.monotonic() + max(seconds, 0.05) * min(self.retry_s, 1.0))
        return True


class _Refused(Exception):
    """An answer that is neither the range nor the whole file."""

    def __init__(self, answer: Answer):
        self.answer = answer
        super().__init__(answer.status)

    def as_error(self) -> PullError:
        """For the user."""
        return PullError(f"{shown(self.answer.url)} answers {self.answer.reason()}")
