"""Writing answers to the terminal: plain as they come, or one Markdown block at a time when stdout is a terminal."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["MarkdownPrinter", "PlainPrinter", "Printer", "split_block", "terminal_text"]

_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_CONTROL |= {0x7F: 0x2421} | {code: 0xFFFD for code in range(0x80, 0xA0)}

_FENCE = re.compile(r"^ {0,3}(```+|~~~+)", re.MULTILINE)
_REFRESH_S = 0.1


def terminal_text(text: str) -> str:
    """`text` with control characters made visible: a model's answer must not move the cursor or set the title."""
    return text.translate(_CONTROL)


class Printer(Protocol):
    """Takes an answer in pieces; `close` ends it with a newline, also after an interrupt."""

    def write(self, piece: str) -> None: ...

    def close(self) -> None: ...


class PlainPrinter:
    """Each piece as it comes; control characters are made visible only on a terminal."""

    def __init__(self) -> None:
        self._tty = sys.stdout.isatty()
        self._last = ""

    def write(self, piece: str) -> None:
        """Write one piece at once."""
        if piece:
            sys.stdout.write(terminal_text(piece) if self._tty else piece)
            sys.stdout.flush()
            self._last = piece

    def close(self) -> None:
        """End the line if the answer did not."""
        if not self._last.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._last = ""


def split_block(text: str) -> tuple[str, str]:
    """The first whole Markdown block of `text` and the rest; ("", text) while the block may still grow. A block ends at
    a blank line outside a code fence, or with the line that closes its fence."""
    fence: str | None = None
    position = 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        if not line.endswith("\n"):
            break
        match = _FENCE.match(line)
        if fence is not None:
            if match and match[1].startswith(fence) and line.strip() == match[1]:
                return text[:position], text[position:]
        elif match:
            fence = match[1]
        elif not line.strip():
            return text[:position], text[position:]
    return "", text


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Ctrl-C within comes at the end of it: half-way through a drawing it would leave a display that cannot be closed
    (rich then fails) or a hidden cursor. Off the main thread none comes."""
    came: list[int] = []
    try:
        before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


class MarkdownPrinter:
    """Shows the growing block as raw text, then replaces it by its rendering; what was rendered never changes again."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._block = ""
        self._live = self._new_live()
        self._shown_at = 0.0

    def _new_live(self) -> Live:
        from rich.live import Live

        return Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)

    def write(self, piece: str) -> None:
        """Take a piece; draws at most every 0.1 s."""
        with _ctrl_c_later():
            self._write(piece)

    def _write(self, piece: str) -> None:
        from rich.text import Text

        if not self._live.is_started:
            self._live.start()
        self._block += terminal_text(piece)
        done, rest = split_block(self._block)
        while done:
            self._print(done)
            self._block = rest
            done, rest = split_block(rest)
        now = time.monotonic()
        if now - self._shown_at >= _REFRESH_S:
            # Only what fits the screen: the cursor cannot go back to lines that have scrolled away.
            room = max(1, self._console.height - 2)
            lines = Text(self._block).wrap(self._console, self._console.width)[-room:]
            self._live.update(Text("\n").join(lines), refresh=True)
            self._shown_at = now

    def _print(self, block: str) -> None:
        from rich.markdown import Markdown
        from rich.text import Text

        self._live.update(Text(""), refresh=True)
        if block.strip():
            self._console.print(Markdown(block))

    def close(self) -> None:
        """Render what is left and give the cursor back."""
        with _ctrl_c_later():
            if self._live.is_started:
                self._print(self._block)
                self._live.stop()
            self._block = ""
            self._live = self._new_live()


def make_printer(render: bool = True) -> Printer:
    """Markdown on a terminal that can draw (and unless `render` is false), else plain."""
    drawable = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and "NO_COLOR" not in os.environ
    return MarkdownPrinter() if render and drawable else PlainPrinter()
