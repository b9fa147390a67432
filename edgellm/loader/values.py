"""Metadata values, decoded when they are asked for.

A vocabulary of 128k tokens is 8 MB of strings; opening a file must not pay for decoding them. Scalars and arrays of up
to `SMALL_ARRAY` elements come as plain Python values, longer arrays as sequences that read the memory map.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from mmap import mmap
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

__all__ = ["SCALARS", "SMALL_ARRAY", "Buffer", "Metadata", "NumberArray", "StringArray", "ValueRef", "ValueType"]

Buffer = bytes | bytearray | memoryview | mmap

SMALL_ARRAY = 256
"""Arrays up to this length (per-layer lists and the like) come as plain lists."""

_LENGTH = struct.Struct("<Q")


class ValueType(IntEnum):
    """GGUF metadata value types by their number in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALARS: dict[ValueType, struct.Struct] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<?"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}


class ValueRef(NamedTuple):
    """Where a value lies: `length` is the byte length of a string, the element count of an array, else 1."""

    type: ValueType
    element: ValueType
    pos: int
    length: int
    end: int


class StringArray(Sequence[str]):
    """An array of strings in the file. Bytes that are not UTF-8 become lone surrogates (`surrogateescape`), so that
    `s.encode("utf-8", "surrogateescape")` gives the file's bytes back."""

    def __init__(self, buffer: Buffer, pos: int, count: int, end: int):
        self._buffer, self._pos, self._count, self._end = buffer, pos, count, end

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        block = bytes(self._buffer[self._pos : self._end])
        unpack, pos = _LENGTH.unpack_from, 0
        for _ in range(self._count):
            start = pos + 8
            pos = start + unpack(block, pos)[0]
            yield block[start:pos].decode("utf-8", "surrogateescape")

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        start = int(self._starts[index])
        stop = start + _LENGTH.unpack_from(self._buffer, start - 8)[0]
        return bytes(self._buffer[start:stop]).decode("utf-8", "surrogateescape")

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        starts = np.empty(self._count, dtype=np.int64)
        unpack, pos = _LENGTH.unpack_from, self._pos
        for i in range(self._count):
            starts[i] = pos + 8
            pos += 8 + unpack(self._buffer, pos)[0]
        return starts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._count} strings>"


class NumberArray(Sequence[Any]):
    """An array of numbers or booleans in the file; `numpy.asarray` gives a view of it without a copy."""

    def __init__(self, values: npt.NDArray[Any]):
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.tolist())

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._values[index].tolist()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        changed = dtype is not None and np.dtype(dtype) != self._values.dtype
        return self._values.astype(dtype) if changed or copy else self._values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} x {self._values.dtype}>"


class Metadata(Mapping[str, Any]):
    """The key-value section of one file. Values are decoded on access; strings that are not UTF-8 get U+FFFD."""

    def __init__(self, buffer: Buffer, refs: dict[str, ValueRef]):
        self._buffer = buffer
        self._refs = refs
        self._decoded: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._refs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def __contains__(self, key: object) -> bool:
        return key in self._refs

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = self._decode(self._refs[key])
        return self._decoded[key]

    def type_of(self, key: str) -> str:
        """Type as the file has it, such as `uint32`, `string` or `string[128256]`."""
        ref = self._refs[key]
        name = ref.element.name.lower()
        return f"{name}[{ref.length}]" if ref.type is ValueType.ARRAY else name

    def _decode(self, ref: ValueRef) -> Any:
        if ref.type is ValueType.STRING:
            return bytes(self._buffer[ref.pos : ref.end]).decode("utf-8", "replace")
        if ref.type is not ValueType.ARRAY:
            return SCALARS[ref.type].unpack_from(self._buffer, ref.pos)[0]
        values: Sequence[Any]
        if ref.element is ValueType.STRING:
            values = StringArray(self._buffer, ref.pos, ref.length, ref.end)
        else:
            values = NumberArray(_numbers(self._buffer, ref))
        return list(values) if ref.length <= SMALL_ARRAY else values


def _numbers(buffer: Buffer, ref: ValueRef) -> npt.NDArray[Any]:
    if ref.element is ValueType.BOOL:
        raw = np.frombuffer(buffer, dtype=np.uint8, count=ref.length, offset=ref.pos)
        flags: npt.NDArray[np.bool_] = raw != 0
        return flags  # a byte other than 0 and 1 is no valid numpy bool
    return np.frombuffer(buffer, dtype=_DTYPES[ref.element], count=ref.length, offset=ref.pos)


_DTYPES: dict[ValueType, str] = {
    ValueType.UINT8: "u1",
    ValueType.INT8: "i1",
    ValueType.UINT16: "<u2",
    ValueType.INT16: "<i2",
    ValueType.UINT32: "<u4",
    ValueType.INT32: "<i4",
    ValueType.FLOAT32: "<f4",
    ValueType.UINT64: "<u8",
    ValueType.INT64: "<i8",
    ValueType.FLOAT64: "<f8",
}
