"""From the word a user typed for MODEL to a file, and from a file to an `LLM`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgellm.cli.options import ModelFlags
from edgellm.cli.session import Session
from edgellm.errors import ModelNotFound, RequestError

if TYPE_CHECKING:
    from edgellm.hub.store import StoredModel
    from edgellm.llm import LLM

__all__ = ["LONGEST_PROMPT", "model_path", "note", "open_llm", "open_session", "read_stdin", "stored_model"]

LONGEST_PROMPT = 32 << 20
"""Bytes of a prompt from stdin: as many as the server takes. A stdin without an end must not fill the memory."""


def note(text: str) -> None:
    """One line on stderr that is no error."""
    click.echo(f"edgellm: {text}", err=True)


def model_path(name: str) -> Path:
    """The first file of MODEL. A name that is not here: on a tty asks whether to pull, else ModelNotFound."""
    from edgellm.hub import names, store

    try:
        return store.resolve(name)
    except (ModelNotFound, RequestError) as error:
        if os.path.isfile(name) and not names.is_path(name):
            raise ModelNotFound(f"no model has the name {name}; for the file of that name write ./{name}") from None
        if isinstance(error, RequestError):
            raise
        if names.is_path(name) or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        if not click.confirm(f"{name} is not here. Pull it?", err=True):
            raise
    from edgellm.cli.main import main

    if code := main(["pull", name]):
        raise SystemExit(code)
    return store.resolve(name)


def stored_model(name: str) -> StoredModel | None:
    """What is stored beside the weights of MODEL (system message, parameters, template); None for a bare file."""
    from edgellm.hub import names, store

    model_path(name)
    return None if names.is_path(name) else store.find(name)


def open_llm(
    name: str,
    flags: ModelFlags,
    template: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> LLM:
    """Load MODEL with the given flags (a context manager, like `LLM` itself). `template` replaces the file's own;
    `progress` hears of kernels that must be compiled (default: a bar)."""
    model_path(name)
    given = flags.given()
    if flags.draft is not None:
        from edgellm.engine.speculate import split_draft

        parts = split_draft(flags.draft)
        for part in parts:
            if part != "lookup":
                model_path(part)
    from edgellm.cli.compile_bar import CompileBar
    from edgellm.llm import LLM

    return LLM(name, **given, template=template, progress=progress or CompileBar())


def read_stdin(limit: int = -1) -> str:
    """All of stdin: no newline is translated or dropped. Bytes that are not UTF-8 become U+FFFD, with a
    note that says so. Raises RequestError for more than `limit` bytes (-1: there is none)."""
    data = sys.stdin.buffer.read(-1 if limit < 0 else limit + 1)
    if len(data) > limit >= 0:
        raise RequestError(f"stdin holds more than {limit >> 20} MiB, which is no prompt")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        note(f"stdin is not UTF-8 at byte {error.start}; such bytes are read as U+FFFD")
        return data.decode("utf-8", "replace")


@contextmanager
def open_session(name: str, flags: ModelFlags, *, local: bool) -> Iterator[Session]:
    """A running server's model of that name (said on stderr), unless `local` or flags ask for an engine of one's own;
    else the model loaded in this process."""
    session: Session | None = None
    if not local and not flags.given():
        from edgellm.cli.server_session import ServerSession, find_server

        if client := find_server(name):
            session = ServerSession(name, client)
    if session is None:
        from edgellm.cli.local_session import LocalSession

        session = LocalSession(name, flags)
    try:
        yield session
    finally:
        session.close()
