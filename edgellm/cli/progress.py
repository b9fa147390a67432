"""Progress of downloads: a bar on a terminal, plain lines elsewhere. All of it on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.show import size_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["PullProgress"]

_LINE_S = 10.0


class PullProgress:
    """Shows the events of `hub.pull`. Rates count what came in this run, not what an earlier one left; the bar never
    goes back, because the counts do not."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._first: dict[str, tuple[float, int]] = {}
        self._said: dict[str, float] = {}
        self._status = ""

    def __enter__(self) -> PullProgress:
        if self._tty:
            from rich import progress as rp
            from rich.console import Console

            self._bar = rp.Progress(
                rp.TextColumn("{task.description}"),
                rp.BarColumn(),
                rp.DownloadColumn(),
                rp.TransferSpeedColumn(),
                rp.TimeRemainingColumn(compact=True),
                console=Console(stderr=True),
            )
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """Shows one event."""
        status, total = event["status"], event.get("total")
        if total is None:
            if status != self._status:  # one that waits for another process says so twice a second
                self._say(status)
            self._status = status
        elif self._bar is not None:
            done = event.get("completed", 0)
            if status not in self._tasks:
                self._tasks[status] = self._bar.add_task(status, total=total, completed=done)
            self._bar.update(self._tasks[status], completed=done)
        else:
            self._line(status, event.get("completed", 0), total)

    def _line(self, status: str, done: int, total: int) -> None:
        now = time.monotonic()
        start, before = self._first.setdefault(status, (now, done))
        last = self._said.get(status, -_LINE_S)
        if (now - last < _LINE_S and done < total) or last == float("inf"):
            return
        self._said[status] = float("inf") if done == total else now
        rate = (done - before) / (now - start) if now > start else 0.0
        left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
        speed = f", {size_text(rate)}/s" if rate else ""
        self._say(f"{status}: {100 * done // max(total, 1)}% of {size_text(total)}{speed}{left}")

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            click.echo(line, err=True)
