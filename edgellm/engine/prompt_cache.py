"""The prefix cache on disk, so that a long prompt need not be computed again after a restart.

File: MAGIC, header length (8 bytes, little-endian), header (JSON), block data, BLAKE2b of all before (32 bytes).
Header: `key` (what the rows depend on: model, backend, settings), `groups`: per cache group `block_bytes` and `blocks`,
a list of [parent digest (hex), token ids], most recently used first; the data lies in the same order.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from edgellm.engine.kv_cache import KVCache
from edgellm.engine.model_runner import Runner
from edgellm.engine.request import chain_digest
from edgellm.errors import RequestError

__all__ = ["PromptCache", "check_path"]

log = logging.getLogger(__name__)

KIND = b"edgellm prompt cache "
MAGIC = KIND + b"1\n"
MAX_HEADER = 64 << 20
MAX_BYTES = 4 << 30
"""Most bytes written; the most recently used prefixes are kept."""
PIECE = 1 << 20
MAX_ID = (1 << 31) - 1

Blocks = list[tuple[bytes, list[int]]]
"""Parent digest and token ids of each block, most recently used first."""


class Damaged(Exception):
    """A file that is not a whole prompt cache."""


def check_path(path: Path) -> None:
    """Refuse, before anything is computed, a file that saving would destroy: somebody else's (a text, a model), or one
    that is no file to write at all (a folder, a pipe). A prompt cache of any version, and an empty file, may go."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise RequestError(f"the prompt cache {path} is not a regular file; give the name of a file")
        with open(path, "rb") as file:
            start = file.read(len(KIND))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"the prompt cache {path} cannot be used: {reason}; give another name") from None
    if start and start != KIND:
        raise RequestError(f"{path} is not a prompt cache and would be overwritten; give another name, or remove it")


class PromptCache:
    """Loads and saves the named blocks of a KV cache. `key`: everything the rows depend on, as plain JSON data."""

    def __init__(self, path: Path, key: dict[str, Any], kv: KVCache, runner: Runner, max_bytes: int = MAX_BYTES):
        self.path, self.key, self.kv, self.runner, self.max_bytes = path, key, kv, runner, max_bytes
        self._saved: set[tuple[int, bytes]] = set()
        """Cache group and digest of the blocks in the file: a window's may be new where the digest is not."""
        self._sizes = [len(runner.read_block(g, 0)) for g in range(len(kv.pools))]

    def load(self) -> int:
        """Bring the file's blocks into the (fresh) cache as evictable ones; returns the tokens of the longest group.
        A file that is damaged or of another model or setting is left alone, with one line in the log."""
        try:
            with open(self.path, "rb") as file:
                header, num_bytes = self._check(file)
                if header.get("key") != json.loads(json.dumps(self.key)):
                    log.warning("prompt cache %s is of another model or setting: not used", self.path)
                    return 0
                return self._read_blocks(file, self._listed(header.get("groups"), num_bytes))
        except FileNotFoundError:
            return 0
        except (OSError, Damaged) as error:
            log.warning("prompt cache %s cannot be used: %s", self.path, error)
            return 0

    def save(self) -> None:
        """Write the cache's blocks, atomically. Does nothing when there is nothing new; a failure is one log line."""
        groups = [list(self._newest(g)) for g in range(len(self.kv.pools))]
        if {(g, digest) for g, blocks in enumerate(groups) for _, digest, _, _ in blocks} <= self._saved:
            return
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                self._write(file, groups)
            os.replace(temporary, self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            log.warning("prompt cache %s was not saved: %s", self.path, error)

    def _newest(self, group: int) -> Iterator[tuple[int, bytes, bytes, tuple[int, ...]]]:
        """Named blocks, most recently used first, within this group's share of the bytes. A parent is used no earlier
        than what follows it, so prefixes stay whole."""
        left = self.max_bytes // len(self.kv.pools)
        for entry in reversed(self.kv.pools[group].named_blocks()):
            left -= self._sizes[group]
            if left < 0:
                return
            yield entry

    def _write(self, file: BinaryIO, groups: list[list[tuple[int, bytes, bytes, tuple[int, ...]]]]) -> None:
        listed = [
            {"block_bytes": size, "blocks": [[parent.hex(), list(tokens)] for _, _, parent, tokens in blocks]}
            for size, blocks in zip(self._sizes, groups, strict=True)
        ]
        header = json.dumps({"key": self.key, "groups": listed}).encode()
        digest = hashlib.blake2b(digest_size=32)

        def put(data: bytes) -> None:
            digest.update(data)
            file.write(data)

        put(MAGIC + len(header).to_bytes(8, "little") + header)
        for g, blocks in enumerate(groups):
            for block, *_ in blocks:
                put(self.runner.read_block(g, block))
        file.write(digest.digest())

    def _check(self, file: BinaryIO) -> tuple[dict[str, Any], int]:
        """The header of a file that is whole, its checksum included, and how many bytes of blocks follow it; the file
        stands at the first block then."""
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(MAGIC) + 8)
        length = int.from_bytes(start[len(MAGIC) :], "little")
        if start[: len(MAGIC)] != MAGIC or not 0 < length <= min(MAX_HEADER, size):
            raise Damaged("not a prompt cache of this version")
        digest, left = hashlib.blake2b(start, digest_size=32), size - len(start) - 32
        text = file.read(length)
        digest.update(text)
        num_bytes = left = left - length
        first = file.tell()
        while left > 0:
            piece = file.read(min(PIECE, left))
            if not piece:
                raise Damaged("the file ends early")
            digest.update(piece)
            left -= len(piece)
        if left < 0 or file.read(33) != digest.digest():
            raise Damaged("the checksum does not match")
        file.seek(first)
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Damaged("the header is no JSON") from error
        if not isinstance(header, dict):
            raise Damaged("the header is no JSON object")
        return header, num_bytes

    def _listed(self, groups: Any, num_bytes: int) -> list[Blocks]:
        """Each group's blocks, checked before any is taken: anybody can write a file with the right checksum."""
        try:
            sizes = [group["block_bytes"] for group in groups]
            listed = [[(bytes.fromhex(parent), list(ids)) for parent, ids in group["blocks"]] for group in groups]
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged("the header does not list blocks") from error
        if sizes != self._sizes:
            raise Damaged("blocks of another size")
        if sum(size * len(blocks) for size, blocks in zip(sizes, listed, strict=True)) != num_bytes:
            raise Damaged("the header lists other blocks than follow it")
        for ids in (ids for blocks in listed for _, ids in blocks):
            if len(ids) != self.kv.block_size or not all(type(i) is int and 0 <= i <= MAX_ID for i in ids):
                raise Damaged("a block whose tokens cannot be its own")
        return listed

    def _read_blocks(self, file: BinaryIO, groups: list[Blocks]) -> int:
        """Blocks are taken from clean ones only, the oldest first, so that the order of eviction is as it was. Each
        when its rows are read, so that a disk that fails leaves none behind that nobody holds."""
        loaded = [0]
        for g, (pool, blocks, size) in enumerate(zip(self.kv.pools, groups, self._sizes, strict=True)):
            first = file.tell()
            fitting = min(len(blocks), pool.num_free)
            for i in range(fitting - 1, -1, -1):
                parent, tokens = blocks[i]
                file.seek(first + i * size)
                data = file.read(size)
                if len(data) != size:
                    raise Damaged("the file ends early")
                [block] = pool.allocate(1)
                self.runner.write_block(g, block, data)
                digest = chain_digest(parent, tokens)
                pool.register(block, digest, parent, tokens)
                pool.release(block)
                self._saved.add((g, digest))
            file.seek(first + len(blocks) * size)
            loaded.append(fitting * self.kv.block_size)
        return max(loaded)
