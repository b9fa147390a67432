"""A model file, or the set of files of a split model, opened for reading."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.errors import GGUFError, ModelNotFound
from edgellm.loader.header import Header, TensorInfo, parse_header, shown
from edgellm.loader.values import Metadata
from edgellm.quants import QUANT_TABLE, QTensor

__all__ = ["GGUFFile", "open_gguf", "shard_paths"]

_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf\Z", re.DOTALL)
_SAMPLE = 4096
_SAMPLES = 64


class Shard:
    """One file: its map and its header. The map lives as long as a view of it does."""

    def __init__(self, path: Path):
        self.path = path
        buffer = _map(path)
        self.header: Header = parse_header(buffer, len(buffer), str(path))
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)

    def tensor(self, info: TensorInfo) -> QTensor:
        """The tensor's bytes in the map, as rows."""
        block = QUANT_TABLE[info.type]
        row_bytes = info.shape[-1] // block.block_size * block.type_size
        data = self.bytes[info.offset : info.offset + info.nbytes].reshape(*info.shape[:-1], row_bytes)
        return QTensor(info.name, info.type, info.shape, data)


class Tensors(Mapping[str, QTensor]):
    """Tensors of all shards by name, in file order; a view is made when a tensor is asked for."""

    def __init__(self, shards: Sequence[Shard]):
        self._places: dict[str, tuple[Shard, TensorInfo]] = {}
        for shard in shards:
            for info in shard.header.tensors:
                if info.name in self._places:
                    other = self._places[info.name][0].path
                    raise GGUFError(f"{shard.path}: tensor {shown(info.name)} is also in {other}")
                self._places[info.name] = (shard, info)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> QTensor:
        shard, info = self._places[name]
        return shard.tensor(info)

    def infos(self) -> Iterator[TensorInfo]:
        """Names, types, shapes and sizes without touching data."""
        return (info for _, info in self._places.values())


class GGUFFile:
    """An open model. Attributes: `metadata` (of the first shard), `tensors` (of all shards), `paths`."""

    def __init__(self, shards: Sequence[Shard]):
        self.paths: tuple[Path, ...] = tuple(shard.path for shard in shards)
        self.metadata: Metadata = shards[0].header.metadata
        self.tensors: Tensors = Tensors(shards)
        self._shards: Sequence[Shard] = shards

    @property
    def version(self) -> int:
        """GGUF version of the (first) file, 2 or 3."""
        return self._shards[0].header.version

    @property
    def architecture(self) -> str:
        """`general.architecture`; GGUFError where it is absent or no text."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise GGUFError(f"{self.paths[0]}: the metadata key 'general.architecture' is missing or not text")
        return value

    @property
    def maps(self) -> list[tuple[Path, npt.NDArray[np.uint8]]]:
        """Path and map (uint8, the whole file) of each file."""
        return [(shard.path, shard.bytes) for shard in self._shards]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, without header and padding."""
        return sum(info.nbytes for info in self.tensors.infos())

    @cached_property
    def digest(self) -> str:
        """A cheap identity: SHA-256 (hex) over each file's size, header and 64 blocks of 4 KiB spread over it.

        Tells models, quantisations and fine-tunes apart; it is no integrity check (see the store's `verify`).
        """
        digest = hashlib.sha256()
        for shard in self._shards:
            size, head = len(shard.bytes), shard.header.header_bytes
            digest.update(size.to_bytes(8, "little"))
            digest.update(shard.bytes[:head].data)
            for i in range(_SAMPLES):
                start = head + (size - head) * i // _SAMPLES
                digest.update(shard.bytes[start : start + _SAMPLE].data)
        return digest.hexdigest()

    def close(self) -> None:
        """Lets go of the maps; tensors that were handed out stay valid as long as they are used."""
        self._shards = ()
        self.tensors = Tensors(())
        self.metadata = Metadata(b"", {})

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> GGUFFile:
    """Opens a model. Any shard of a split model (`NAME-00002-of-00003.gguf`) opens the whole set; a list gives the
    shards' paths in order, whatever they are called (a content-addressed store).

    Every count, size, offset and name is checked here, before any data is used. Raises GGUFError (damaged or no GGUF)
    or ModelNotFound (no such file).
    """
    if isinstance(path, (str, os.PathLike)):
        first = Shard(Path(path))
        paths = shard_paths(first.path, _split(first, "split.count", 1))
        shards = [first if p == first.path else Shard(p) for p in paths]
    else:
        shards = [Shard(Path(p)) for p in path]
        if not shards:
            raise GGUFError("no file given")
    if len(shards) > 1 or "split.count" in shards[0].header.metadata:
        _check_set(shards)
    return GGUFFile(shards)


def shard_paths(path: Path, count: int) -> list[Path]:
    """All files of the set of `count` shards that `path` belongs to, first to last; [path] where count is 1 or 0."""
    if count <= 1:
        return [path]
    match = _SHARD_NAME.match(path.name)
    if match is None or int(match["count"]) != count:
        raise GGUFError(
            f"{path}: is one of {count} files of a split model (split.count), but its name does not end in "
            f"-00001-of-{count:05}.gguf: give the files their original names"
        )
    return [path.with_name(f"{match['prefix']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]


def _check_set(shards: Sequence[Shard]) -> None:
    for i, shard in enumerate(shards):
        number, count = _split(shard, "split.no", 0), _split(shard, "split.count", 1)
        if count != max(len(shards), 1) and not (count == 0 and len(shards) == 1):
            raise GGUFError(f"{shard.path}: split.count is {count}, but the set has {len(shards)} files")
        if number != i:
            raise GGUFError(
                f"{shard.path}: is part {number + 1} of the split model, but stands where part {i + 1} belongs; "
                "the files were renamed or mixed up"
            )
    total = sum(len(shard.header.tensors) for shard in shards)
    expected = _split(shards[0], "split.tensors.count", total)
    if expected != total:
        raise GGUFError(f"{shards[0].path}: split.tensors.count is {expected}, but the files hold {total} tensors")


def _split(shard: Shard, key: str, default: int) -> int:
    value: Any = shard.header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise GGUFError(f"{shard.path}: {key} must be a whole number, not {shard.header.metadata.type_of(key)}")
    return value


def check_file(path: Path, shown: str = "") -> None:
    """Sees that a regular file is at `path`, which messages call `shown`. Raises ModelNotFound where nothing is there,
    GGUFError for anything else (a folder, a link to itself, a folder on the way that may not be entered)."""
    shown = shown or str(path)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        leads = f": it is a link to {os.readlink(path)}, which is not there" if path.is_symlink() else ""
        raise ModelNotFound(f"{shown}: no such file{leads}") from None
    except ValueError as error:  # a NUL byte in the path
        raise GGUFError(f"{shown!a}: cannot be opened: {error}") from None
    except OSError as error:
        raise GGUFError(f"{shown}: cannot be opened: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        raise GGUFError(f"{shown}: is a folder; give the .gguf file in it")
    if not stat.S_ISREG(mode):
        raise GGUFError(f"{shown}: is not a regular file")


def _map(path: Path) -> mmap.mmap | bytes:
    """The whole file as a read-only map (an empty file cannot be mapped: empty bytes)."""
    check_file(path)
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # A file read for the first time then comes in huge pages where the file system has them (ext4, XFS and Btrfs
        # on new kernels): kernels read it 1.2 times as fast. Elsewhere the request fails or changes nothing. For files
        # that are in the page cache already there is `huge_pages.py`.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                mapped.madvise(mmap.MADV_HUGEPAGE)
        return mapped
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: no such file") from None
    except ValueError as error:  # the file shrank between the two calls
        raise GGUFError(f"{path}: cannot be opened: {error}") from None
    except OSError as error:
        raise GGUFError(f"{path}: cannot be opened: {error.strerror}") from None
