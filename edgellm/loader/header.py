"""The GGUF header: magic, counts, metadata, tensor infos. Checks every length against the bytes that are left before
it is used, so that no number in a file decides how much memory is taken or how long a loop runs.

Works on a memory map of the whole file or on its first bytes (`Incomplete` says how many more are needed): a planner
reads a remote file's header this way.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from edgellm.errors import GGUFError
from edgellm.loader.values import SCALARS, Buffer, Metadata, ValueRef, ValueType
from edgellm.quants import QUANT_TABLE, GGMLType

__all__ = ["Header", "Incomplete", "TensorInfo", "parse_header"]

MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_STRINGS = 1 << 23
"""String array elements in one header. Real files have under a million; each costs a step of a Python loop."""
MAX_NAME = 1 << 16

_SMALLEST_ENTRY = 8 + 4 + 1  # an empty name is refused later, with the right words
_SMALLEST_TENSOR = 8 + 4 + 4 + 8
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_REMOVED_TYPES = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4"}
_REMOVED_TYPES |= {37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}


class Incomplete(EOFError):
    """The buffer ends before the header does; `needed` bytes from the start of the file get it further."""

    def __init__(self, needed: int):
        self.needed = needed
        super().__init__(f"{needed} bytes of the file are needed")


class TensorInfo(NamedTuple):
    """`shape` in numpy order; `offset` in bytes from the start of the file; `nbytes` without padding."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(NamedTuple):
    """One file's header. `data_start`: first byte of tensor data."""

    version: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_start: int
    header_bytes: int


def shown(name: str) -> str:
    """A name from a file as one short printable piece of a message."""
    text = ascii(name)
    return text if len(text) <= 80 else text[:76] + "...'"


class _Cursor:
    """Reads forward through the buffer of a file of `size` bytes."""

    def __init__(self, buffer: Buffer, size: int, label: str):
        self.buffer, self.size, self.label = buffer, size, label
        self.have = len(buffer)
        self.pos = 0
        self.strings_left = MAX_STRINGS

    def fail(self, what: str) -> GGUFError:
        return GGUFError(f"{self.label}: {what}")

    def skip(self, n: int, what: str) -> int:
        """Moves over n bytes and gives their start."""
        start = self.pos
        if n > self.size - start:
            raise self.fail(f"{what} needs {n} bytes at byte {start}, but the file ends at byte {self.size}")
        if n > self.have - start:
            raise Incomplete(start + n)
        self.pos = start + n
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.skip(8, what))[0])

    def name(self, what: str) -> str:
        length = self.u64(f"the length of {what}")
        if length == 0:
            raise self.fail(f"{what} is empty")
        if length > MAX_NAME:
            raise self.fail(f"{what} is {length} bytes long; at most {MAX_NAME} are allowed")
        start = self.skip(length, what)
        try:
            return bytes(self.buffer[start : self.pos]).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8 text") from None

    def skip_strings(self, count: int, what: str) -> None:
        """Moves over `count` strings: the one loop that runs once per token, so it stays this short."""
        if count > self.strings_left:
            raise self.fail(f"{what} brings the strings in arrays above {MAX_STRINGS}, the most that is accepted")
        self.strings_left -= count
        buffer, unpack, pos, last = self.buffer, _U64.unpack_from, self.pos, self.have - 8
        for i in range(count):
            if pos > last:
                self.pos = min(pos, self.have)
                self.skip(pos + 8 - self.pos, f"string {i} of {what}")
            pos += 8 + unpack(buffer, pos)[0]
        self.pos = min(pos, self.have)
        self.skip(pos - self.pos, f"the last string of {what}")


def parse_header(buffer: Buffer, size: int, label: str) -> Header:
    """Reads the header from `buffer`, the first bytes (or all) of a file of `size` bytes; `label` names it in errors.

    Raises GGUFError, or Incomplete where the file is longer than the buffer and the header is too.
    """
    cur = _Cursor(buffer, size, label)
    version = _magic_and_version(cur)
    n_tensors = cur.u64("the tensor count")
    n_keys = cur.u64("the metadata count")
    _check_count(cur, "metadata", n_keys, _SMALLEST_ENTRY, MAX_KEYS)
    _check_count(cur, "tensor", n_tensors, _SMALLEST_TENSOR, MAX_TENSORS)
    refs: dict[str, ValueRef] = {}
    for i in range(n_keys):
        key = cur.name(f"metadata key {i}")
        if key in refs:
            raise cur.fail(f"metadata key {shown(key)} appears twice")
        refs[key] = _value(cur, key)
    metadata = Metadata(buffer, refs)
    alignment = _alignment(cur, metadata, refs)
    raw = [_tensor_info(cur, i) for i in range(n_tensors)]
    header_bytes = cur.pos
    data_start = -(-header_bytes // alignment) * alignment
    tensors = _layout(cur, raw, data_start, alignment)
    return Header(version, metadata, tensors, alignment, data_start, header_bytes)


def _check_count(cur: _Cursor, what: str, count: int, smallest: int, most: int) -> None:
    left = cur.size - cur.pos
    if count > left // smallest:
        raise cur.fail(f"the {what} count says {count} entries, which the {left} bytes left cannot hold")
    if count > most:
        raise cur.fail(f"the {what} count says {count} entries; at most {most} are accepted")


def _magic_and_version(cur: _Cursor) -> int:
    if cur.size == 0:
        raise cur.fail("is empty (0 bytes), so not a GGUF file; the download or copy failed")
    if cur.have < min(24, cur.size):
        raise Incomplete(min(24, cur.size))
    head = bytes(cur.buffer[: min(24, cur.size)])
    if head[:4] != b"GGUF":
        raise cur.fail(f"is not a GGUF file: it begins with {head[:8]!r}{_hint(head)}")
    cur.pos = 4
    version = cur.u32("the version")
    if version in (2, 3):
        return version
    if version & 0xFFFF == 0 and version:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise cur.fail(
            f"has big-endian byte order (GGUF version {swapped} read backwards); only little-endian files can be read: "
            "get or convert a little-endian one"
        )
    raise cur.fail(f"has GGUF version {version}; versions 2 and 3 can be read: convert it with a recent converter")


def _hint(head: bytes) -> str:
    """What a file that is not GGUF seems to be, in words."""
    known = {
        b"version https": "; it is a Git LFS pointer, the text stands for the real file: run `git lfs pull`",
        b"FUGG": "; it has big-endian byte order",
        b"PK": "; it looks like a PyTorch or zip archive: convert it to GGUF",
        b"<": "; it looks like a web page: the download link was wrong or needed a login",
        b"tjgg": "; it is in a format older than GGUF: convert it again",
        b"fmgg": "; it is in a format older than GGUF: convert it again",
        b"lmgg": "; it is in a format older than GGUF: convert it again",
        b"\x00" * 8: "; it is full of zeros: an unfinished download",
    }
    for start, words in known.items():
        if head.startswith(start):
            return words
    if head[8:9] == b"{":
        return "; it looks like a safetensors file: convert it to GGUF"
    return ""


def _value(cur: _Cursor, key: str) -> ValueRef:
    what = f"the value of {shown(key)}"
    kind = _value_type(cur, what)
    if kind is ValueType.STRING:
        length = cur.u64(f"the length of {what}")
        return ValueRef(kind, kind, cur.skip(length, what), length, cur.pos)
    if kind is not ValueType.ARRAY:
        return ValueRef(kind, kind, cur.skip(SCALARS[kind].size, what), 1, cur.pos)
    element = _value_type(cur, f"the elements of {shown(key)}")
    count = cur.u64(f"the element count of {shown(key)}")
    if element is ValueType.ARRAY:
        raise cur.fail(f"{what} is an array of arrays, which GGUF readers do not support")
    smallest = 8 if element is ValueType.STRING else SCALARS[element].size
    left = cur.size - cur.pos
    if count > left // smallest:
        raise cur.fail(f"{what} says {count} elements, which the {left} bytes left cannot hold")
    start = cur.pos
    if element is ValueType.STRING:
        cur.skip_strings(count, what)
    else:
        cur.skip(count * smallest, what)
    return ValueRef(kind, element, start, count, cur.pos)


def _value_type(cur: _Cursor, what: str) -> ValueType:
    number = cur.u32(f"the type of {what}")
    try:
        return ValueType(number)
    except ValueError:
        raise cur.fail(f"{what} has unknown type number {number}; known are 0 to 12") from None


def _alignment(cur: _Cursor, metadata: Metadata, refs: dict[str, ValueRef]) -> int:
    key = "general.alignment"
    if key not in refs:
        return 32
    if refs[key].type is not ValueType.UINT32:
        raise cur.fail(f"{key} must be a uint32, not {metadata.type_of(key)}")
    value = int(metadata[key])
    if value == 0 or value & (value - 1):
        raise cur.fail(f"{key} must be a power of two, not {value}")
    return value


def _tensor_info(cur: _Cursor, i: int) -> TensorInfo:
    name = cur.name(f"the name of tensor {i}")
    what = f"tensor {shown(name)}"
    n_dims = cur.u32(f"the dimension count of {what}")
    if n_dims > 4:
        raise cur.fail(f"{what} has {n_dims} dimensions; at most 4 are possible")
    ne = [cur.u64(f"dimension {d} of {what}") for d in range(n_dims)] or [1]
    number = cur.u32(f"the type of {what}")
    offset = cur.u64(f"the offset of {what}")
    if number in _REMOVED_TYPES:
        raise cur.fail(f"{what} has type {_REMOVED_TYPES[number]}, which ggml has removed: get a newer quantisation")
    try:
        kind = GGMLType(number)
    except ValueError:
        raise cur.fail(f"{what} has unknown type number {number}") from None
    info = QUANT_TABLE[kind]
    if ne[0] % info.block_size:
        raise cur.fail(f"{what} is {ne[0]} wide; rows of type {kind.name} come in blocks of {info.block_size}")
    nbytes = ne[0] // info.block_size * info.type_size
    most = nbytes or 1
    for n in ne[1:]:
        nbytes *= n
        most *= n or 1
    if most >= 1 << 62:
        raise cur.fail(f"{what} has dimensions {ne}, more bytes than any file can hold")
    return TensorInfo(name, kind, tuple(reversed(ne)), offset, nbytes)


def _layout(cur: _Cursor, raw: list[TensorInfo], data_start: int, alignment: int) -> tuple[TensorInfo, ...]:
    """Tensors with offsets from the start of the file. They must lie one after the other, each padded to the
    alignment, as llama.cpp demands. Padding after the last may be absent, but not cut."""
    names: set[str] = set()
    expected = 0
    tensors = []
    for info in raw:
        what = f"tensor {shown(info.name)}"
        if info.name in names:
            raise cur.fail(f"{what} appears twice")
        names.add(info.name)
        if info.offset != expected:
            why = "is not a multiple of the alignment" if info.offset % alignment else "is out of place"
            raise cur.fail(f"the offset of {what}, {info.offset}, {why}; {expected} is right (alignment {alignment})")
        end = data_start + info.offset + info.nbytes
        if end > cur.size:
            raise cur.fail(
                f"{what} ends at byte {end}, but the file has {cur.size}: {end - cur.size} bytes are missing; "
                "the file is cut short, download it again"
            )
        tensors.append(info._replace(offset=data_start + info.offset))
        expected += -(-info.nbytes // alignment) * alignment
    padded = data_start + expected
    if tensors and tensors[-1].offset + tensors[-1].nbytes < cur.size < padded:
        raise cur.fail(
            f"the padding after tensor {shown(tensors[-1].name)} ends early: {padded - cur.size} bytes are missing; "
            "the file is cut short, download it again"
        )
    return tuple(tensors)
