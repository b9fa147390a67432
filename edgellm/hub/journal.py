"""A download on disk: the data file at its full length, and the journal of the parts that are safely in it.

The order that makes a resume right after a power loss: a part's bytes are written, the data file is synced, and only
then does the part's line go into the journal. A part without a line is fetched again, whatever the file holds.

Parts carry a CRC-32: it only has to tell which part the disk damaged once the SHA-256 of the whole is wrong, and it
costs a sixth of a second SHA-256.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgellm.errors import StoreError
from edgellm.hub.disk import make_folder, sync_folder, write_atomic, write_failed

__all__ = ["Geometry", "Partial", "part_digest", "part_size_for"]

_LINE = re.compile(r"(\d{1,9}) ([0-9a-f]{8})\Z")
_SMALLEST_PART, _LARGEST_PART = 256 << 10, 8 << 20
_PARTS = 640
_HUGE_PAGE = 2 << 20


def part_digest(data: bytes | bytearray | memoryview) -> str:
    """CRC-32 of a part's bytes, eight hex digits."""
    return f"{zlib.crc32(data):08x}"


def part_size_for(size: int) -> int:
    """Bytes per range. About 1/640 of the file: what four connections lose when the process is killed is under 1%."""
    wanted = -(-size // _PARTS)
    if wanted > _HUGE_PAGE:  # a part that is written at once then lies in the page cache in huge pages, where there are
        wanted -= wanted % _HUGE_PAGE
    return min(max(-(-wanted // 4096) * 4096, _SMALLEST_PART), _LARGEST_PART)


@dataclass(frozen=True)
class Geometry:
    """How a file of `size` bytes is cut into parts of `part_size` (the last may be shorter)."""

    size: int
    part_size: int

    @property
    def n_parts(self) -> int:
        """Number of parts."""
        return -(-self.size // self.part_size)

    def span(self, part: int) -> tuple[int, int]:
        """First byte, and the byte after the last, of a part."""
        return part * self.part_size, min((part + 1) * self.part_size, self.size)

    def length(self, part: int) -> int:
        """Bytes in a part."""
        start, stop = self.span(part)
        return stop - start


class Partial:
    """One download's two files. `done`: the CRC-32 (`part_digest`) of each part that is safely there.

    Not thread-safe but for `write`, which any thread may call for parts of its own.
    """

    def __init__(self, folder: Path, key: str, size: int, label: str):
        self.data = make_folder(folder) / f"{key}.data"
        self.journal = folder / f"{key}.journal"
        self.done: dict[int, str] = {}
        self.bad = False
        """The whole digest was found wrong: parts are suspects until they are fetched again."""
        self.label = label
        self._file = self._log = -1
        self.geometry = Geometry(size, part_size_for(size))
        self._load()
        try:
            self._file = os.open(self.data, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.fstat(self._file).st_size != size:
                os.ftruncate(self._file, size)
            self._start_journal()
        except OSError as error:
            raise write_failed(self.data, error) from None

    def write(self, offset: int, block: bytes | bytearray | memoryview) -> None:
        """Puts bytes into the data file."""
        view = memoryview(block)
        try:
            while view:
                n = os.pwrite(self._file, view, offset)
                offset, view = offset + n, view[n:]
        except OSError as error:
            raise write_failed(self.data, error) from None

    def read(self, part: int) -> bytes:
        """A part's bytes as they are in the file."""
        start, stop = self.geometry.span(part)
        data = os.pread(self._file, stop - start, start)
        if len(data) != stop - start:
            raise StoreError(f"{self.data} is shorter than it was; start the pull again")
        return data

    def sync(self) -> None:
        """Returns when every byte written so far is on the disk itself."""
        full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone stops at the drive's cache
        try:
            if full is not None:
                fcntl.fcntl(self._file, full)
            else:
                os.fsync(self._file)
        except OSError as error:
            raise write_failed(self.data, error) from None

    def note(self, parts: Iterable[tuple[int, str]]) -> None:
        """Says in the journal that parts are there. The caller has synced the data after writing them."""
        parts = list(parts)
        lines = "".join(f"{part} {digest}\n" for part, digest in parts)
        try:
            os.write(self._log, lines.encode())
            os.fsync(self._log)
        except OSError as error:
            raise write_failed(self.journal, error) from None
        self.done.update(parts)

    def forget(self, parts: Iterable[int]) -> None:
        """Takes parts out of the journal: they are fetched again."""
        for part in parts:
            self.done.pop(part, None)
        self._start_journal()

    def mark_bad(self, bad: bool) -> None:
        """Remembers on disk whether the whole digest was wrong."""
        self.bad = bad
        self._start_journal()

    def finish(self) -> Path:
        """Closes both files and drops the journal; the data file is whole and is the caller's now."""
        self.close()
        self.journal.unlink(missing_ok=True)
        return self.data

    def close(self) -> None:
        """Lets go of the files; what came is kept."""
        handles, self._file, self._log = (self._file, self._log), -1, -1
        for handle in handles:
            if handle >= 0:
                os.close(handle)

    @property
    def done_bytes(self) -> int:
        """Bytes of the parts that are safely there."""
        return sum(self.geometry.length(part) for part in self.done)

    def _load(self) -> None:
        """Reads the journal; lines that a power loss tore, and a journal of another file, count for nothing."""
        try:
            lines = self.journal.read_bytes().decode("ascii", "replace").split("\n")
            head = json.loads(lines[0])
            size, part_size, bad = head["size"], head["part_size"], head.get("bad", False)
            if size != self.geometry.size or not isinstance(part_size, int) or not 4096 <= part_size <= _LARGEST_PART:
                return
            if self.data.stat().st_size != size:
                return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return
        self.geometry, self.bad = Geometry(size, part_size), bad is True
        for line in lines[1:-1]:  # the last piece has no line end: torn, or empty
            match = _LINE.match(line)
            if match and int(match[1]) < self.geometry.n_parts:
                self.done[int(match[1])] = match[2]

    def _start_journal(self) -> None:
        """Writes the journal anew (compacted) and opens it for appending."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
        head = {"size": self.geometry.size, "part_size": self.geometry.part_size, "bad": self.bad, "label": self.label}
        lines = [json.dumps(head), *(f"{part} {digest}" for part, digest in sorted(self.done.items()))]
        write_atomic(self.journal, ("\n".join(lines) + "\n").encode())
        self._log = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        sync_folder(self.journal.parent)
