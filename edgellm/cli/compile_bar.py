"""The bar that is shown while kernels are compiled: once per machine and kernel."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from edgellm.cli.opening import note

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["CompileBar"]


class CompileBar:
    """Call it as the CPU backend's `progress(done, total, name)`: before each kernel, and with done == total at the
    end. Draws a bar on a terminal, else says one line."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Spent on compiling so far."""
        self._started: float | None = None
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int, name: str) -> None:
        if self._started is None:
            self._started = time.perf_counter()
            self._open(total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)
        if done == total:
            self.seconds += time.perf_counter() - self._started
            self.close()

    def _open(self, total: int) -> None:
        from edgellm.backends.cpu.jit import host_target

        title = f"compiling kernels for {host_target().cpu}"
        if not sys.stderr.isatty():
            note(f"{title} ({total}, once on this machine)")
            return
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._bar.add_task(title, total=total)
        self._bar.start()

    def close(self) -> None:
        """Take the bar away. Idempotent."""
        if self._bar is not None:
            self._bar.stop()
        self._started, self._bar = None, None
