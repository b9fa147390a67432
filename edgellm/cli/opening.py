"""From the word a user typed for MODEL to a file, and from a file to an `LLM`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgellm.cli.options import ModelFlags
from edgellm.cli.session import Session
from edgellm.errors import ModelNotFound

if TYPE_CHECKING:
    from edgellm.llm import LLM

__all__ = ["clean_text", "model_path", "note", "open_llm", "open_session", "read_stdin"]


def note(text: str) -> None:
    """One line on stderr that is no error."""
    click.echo(f"edgellm: {text}", err=True)


def model_path(name: str) -> Path:
    """The first file of MODEL. A name that is not here: on a tty asks whether to pull, else ModelNotFound."""
    from edgellm.hub import store

    try:
        return store.resolve(name)
    except ModelNotFound:
        if not (sys.stdin.isatty() and sys.stderr.isatty()) or name.endswith(".gguf"):
            raise
        if not click.confirm(f"{name} is not here. Pull it?", err=True):
            raise
    from edgellm.cli.main import main

    if code := main(["pull", name]):
        raise SystemExit(code)
    return store.resolve(name)


def open_llm(name: str, flags: ModelFlags) -> LLM:
    """Load MODEL with the given flags (a context manager, like `LLM` itself)."""
    path = model_path(name)
    if flags.draft is not None:
        model_path(flags.draft)
    from edgellm.llm import LLM

    return LLM(path, **flags.given())


def clean_text(text: str) -> str:
    """`text` with bytes that were not UTF-8 (Python keeps them as lone surrogates) replaced by U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read_stdin() -> str:
    """All of stdin, byte for byte: no newline is translated or dropped. Bytes that are not UTF-8 become U+FFFD, with a
    note that says so."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        note(f"stdin is not UTF-8 at byte {error.start}; such bytes are read as U+FFFD")
        return data.decode("utf-8", "replace")


@contextmanager
def open_session(name: str, flags: ModelFlags, *, local: bool) -> Iterator[Session]:
    """A running server's model of that name (said on stderr), unless `local`; else the model loaded in this process."""
    from edgellm.cli.local_session import LocalSession

    session: Session = LocalSession(name, flags)
    try:
        yield session
    finally:
        session.close()
