"""A file for the blocks of preempted requests: spilled instead of computed again."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from edgellm.engine.block_pool import NULL_BLOCK
from edgellm.engine.model_runner import Runner

__all__ = ["SwapFile"]

log = logging.getLogger(__name__)


class SwapFile:
    """Slots of one block each, one size per cache group, in unnamed files that vanish with the process.

    `limit`: bytes of disk at most. Implements `scheduler.SwapSpace`."""

    def __init__(self, runner: Runner, num_groups: int, limit: int, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.limit = limit
        self.used = 0
        self._runner = runner
        self._block_bytes = [len(runner.read_block(group, NULL_BLOCK)) for group in range(num_groups)]
        self._files = [tempfile.TemporaryFile(dir=folder, buffering=0) for _ in range(num_groups)]  # noqa: SIM115
        self._free: list[list[int]] = [[] for _ in range(num_groups)]
        self._count = [0] * len(self._files)
        self._slots: dict[int, list[list[int]]] = {}

    def save(self, request_id: int, tables: list[list[int]]) -> bool:
        """Copy the rows of all blocks out; False when there is no room (or the disk refuses)."""
        blocks = [[b for b in table if b != NULL_BLOCK] for table in tables]
        need = sum(len(b) * size for b, size in zip(blocks, self._block_bytes, strict=True))
        if self.used + need > self.limit:
            log.info("swap space of %d bytes is full: request %d is computed again later", self.limit, request_id)
            return False
        slots = self._slots[request_id] = [[self._take(group) for _ in members] for group, members in enumerate(blocks)]
        self.used += need
        try:
            for group, members in enumerate(blocks):
                for block, slot in zip(members, slots[group], strict=True):
                    self._write(group, slot, self._runner.read_block(group, block))
        except OSError as error:
            log.warning("swapping out failed (%s): request %d is computed again later", error, request_id)
            self.drop(request_id)
            return False
        return True

    def load(self, request_id: int, tables: list[list[int]]) -> bool:
        """Copy the rows back into tables of the same shape, and forget them. False when they cannot be read: what was
        copied until then is of no use."""
        try:
            for group, (table, slots) in enumerate(zip(tables, self._slots[request_id], strict=True)):
                for block, slot in zip((b for b in table if b != NULL_BLOCK), slots, strict=True):
                    self._runner.write_block(group, block, self._read(group, slot))
        except OSError as error:
            log.warning("swapping in failed (%s): request %d is computed again", error, request_id)
            return False
        finally:
            self.drop(request_id)
        return True

    def drop(self, request_id: int) -> None:
        """Forget the rows of a request, if there are any."""
        for group, slots in enumerate(self._slots.pop(request_id, [])):
            self._free[group] += slots
            self.used -= len(slots) * self._block_bytes[group]

    def close(self) -> None:
        """Give the disk back."""
        for file in self._files:
            file.close()

    def _take(self, group: int) -> int:
        """A free slot, or a new one at the end."""
        if self._free[group]:
            return self._free[group].pop()
        self._count[group] += 1
        return self._count[group] - 1

    def _read(self, group: int, slot: int) -> bytes:
        size, data = self._block_bytes[group], b""
        while len(data) < size:
            piece = os.pread(self._files[group].fileno(), size - len(data), slot * size + len(data))
            if not piece:
                raise OSError("the file has become shorter")
            data += piece
        return data

    def _write(self, group: int, slot: int, data: bytes) -> None:
        size = self._block_bytes[group]
        if len(data) != size:
            raise RuntimeError(f"a block of group {group} has {len(data)} bytes, not {size}")
        done = 0
        while done < size:
            done += os.pwrite(self._files[group].fileno(), data[done:], slot * size + done)
