"""Reading one message at a time: an editor line with history on a terminal, or plain lines.

A message is one line, or anything between triple quotes, or what is pasted (a terminal that marks pastes sends them as
one piece). The newline after the opening quotes and the one before the closing quotes are not part of the message.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from edgellm.cli.opening import note

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

__all__ = ["LineReader", "Reader", "TerminalReader", "make_reader", "quotes_are_open", "unquote"]

QUOTES = '"""'
PROMPT, CONTINUED = ">>> ", "... "


def quotes_are_open(text: str) -> bool:
    """Whether `text` starts with triple quotes that nothing closes yet."""
    inner = text.strip()
    return inner.startswith(QUOTES) and not (len(inner) >= 2 * len(QUOTES) and inner.endswith(QUOTES))


def unquote(text: str) -> str:
    """The message itself: triple quotes around it are taken off."""
    inner = text.strip()
    if not inner.startswith(QUOTES) or quotes_are_open(text):
        return text
    return inner[len(QUOTES) : -len(QUOTES)].removeprefix("\n").removesuffix("\n")


class Reader(Protocol):
    """Where messages come from."""

    def read(self) -> str:
        """The next message as typed, quotes included. EOFError at the end, KeyboardInterrupt at Ctrl-C."""


class LineReader:
    """Plain lines from stdin, for a terminal on which nothing can be drawn."""

    def __init__(self) -> None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")

    def read(self) -> str:
        """See `Reader`."""
        text = self._line(PROMPT)
        while quotes_are_open(text):
            text += self._line(CONTINUED)
        return _as_utf8(text.removesuffix("\n"))

    def _line(self, prompt: str) -> str:
        screen = _screen()
        if screen.isatty():
            screen.write(prompt)
            screen.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line


class TerminalReader:
    """prompt_toolkit's editor: Enter sends, unless triple quotes are open; Alt-Enter starts a new line."""

    def __init__(self, history: Path):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        output = create_output(_screen())
        if hasattr(output, "enable_cpr"):
            # Asking the terminal where its cursor is costs a second at every prompt on one that does not answer.
            output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            message=[("ansicyan", PROMPT)],
            history=_history(history),
            key_bindings=_key_bindings(),
            multiline=True,
            prompt_continuation=[("ansicyan", CONTINUED)],
            output=output,
            enable_history_search=True,
        )

    def read(self) -> str:
        """See `Reader`."""
        return _as_utf8(self._session.prompt())


def _screen() -> TextIO:
    """Where prompts go: answers may be on their way into a file."""
    return sys.stdout if sys.stdout.isatty() else sys.stderr


def _as_utf8(text: str) -> str:
    """What was typed. Bytes that are not UTF-8 (Python keeps them as lone surrogates) become U+FFFD, and a note says
    so."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        note("what was typed is not UTF-8; such bytes are read as U+FFFD")
        return data.decode("utf-8", "replace")


def _history(path: Path) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError as error:
        note(f"no history is kept: {error}")
        return InMemoryHistory()
    return FileHistory(str(path))


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if quotes_are_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-d")
    def _end(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if not buffer.text or (quotes_are_open(buffer.text) and buffer.document.is_cursor_at_the_end):
            event.app.exit(exception=EOFError, style="class:exiting")
        else:
            buffer.delete()

    return bindings


def make_reader(history: Path) -> Reader:
    """The editor where something can be drawn, else plain lines."""
    drawable = (sys.stdout.isatty() or sys.stderr.isatty()) and os.environ.get("TERM", "dumb") != "dumb"
    return TerminalReader(history) if drawable else LineReader()
