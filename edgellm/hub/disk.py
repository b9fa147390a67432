"""Writes that survive a crash, and locks between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from edgellm.errors import StoreError

__all__ = ["check_room", "locked", "make_folder", "scratch", "sync_folder", "try_hold", "try_lock", "write_atomic"]
__all__ += ["write_failed"]

_SPARE = 64 << 20
"""Bytes that must stay free on the disk."""


def check_room(folder: Path, needed: int, what: str) -> None:
    """Refuses what the disk of a folder has no room for, before its first byte is written."""
    free = shutil.disk_usage(make_folder(folder)).free
    if needed and needed + _SPARE > free:
        raise StoreError(
            f"no space: {what} needs {needed / 1e9:.2f} GB more on the disk of {folder}, "
            f"{free / 1e9:.2f} GB are free; free some, or set EDGELLM_HOME to another disk"
        )


def write_failed(path: Path, error: OSError) -> StoreError:
    """What to tell a user whose disk did not take a write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(f"no space left on the disk of {path.parent}; free some and try again")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StoreError(f"{path.parent} cannot be written ({error.strerror}); set EDGELLM_HOME to a writable folder")
    return StoreError(f"{path} cannot be written: {error.strerror}")


def make_folder(folder: Path) -> Path:
    """The folder, made with its parents where it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_failed(folder / "x", error) from None
    return folder


def sync_folder(folder: Path) -> None:
    """Makes renames and new names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file so that at any moment, also after a power loss, it has its old or its new content."""
    make_folder(path.parent)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise write_failed(path, error) from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path` among all processes; it goes when the process dies."""
    handle = _open_lock(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """As `locked`, but gives False at once where another process holds it."""
    handle = _open_lock(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            held = False
        yield held
    finally:
        os.close(handle)


@contextmanager
def scratch(folder: Path, prefix: str) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file that is removed at the end, unless it was moved away. It is locked till then, by which what a killed
    process left can be told from it (`try_hold`)."""
    while True:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=make_folder(folder))
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            break
        os.close(handle)  # taken for a left one before it was locked
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o644)
            yield file, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def try_hold(path: Path) -> Iterator[bool]:
    """Locks a file itself; False where a process writes it (`scratch`), or where it is gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            held = False
        yield held
    finally:
        os.close(handle)


def _open_lock(path: Path) -> int:
    make_folder(path.parent)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise write_failed(path, error) from None
