"""A GGUF byte writer that can lie (T1): every count, length, type, offset and padding can be set to a wrong value.

    GGUFBytes().text("general.architecture", "llama").tensor("t.weight", F32, [4], data).build()

Written from the format's description, not with the project's reader, so that the two check each other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32V, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
"""Metadata value types."""
F32, F16, Q4_0, Q4_1, Q4_K = 0, 1, 2, 3, 12
"""Some tensor types."""

_FORMATS = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32V: "f",
    BOOL: "?",
    U64: "Q",
    I64: "q",
    F64: "d",
}


@dataclass
class Tensor:
    """A tensor info and its data. `ne`: dimensions in file order (row width first). `offset` None: the right one."""

    name: str
    type: int
    ne: list[int]
    data: bytes
    offset: int | None = None
    n_dims: int | None = None


@dataclass
class GGUFBytes:
    """What goes into one file. None for a count means the true one; `align` is how data is really padded."""

    version: int = 3
    align: int = 32
    magic: bytes = b"GGUF"
    n_tensors: int | None = None
    n_kv: int | None = None
    order: str = "<"
    pad_last: bool = True
    pairs: list[bytes] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def string(self, value: str | bytes, length: int | None = None) -> bytes:
        """A length (true or given) and the bytes."""
        raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        return struct.pack(self.order + "Q", len(raw) if length is None else length) + raw

    def value(self, kind: int, value: Any) -> bytes:
        """One value without its type number."""
        return self.string(value) if kind == STRING else struct.pack(self.order + _FORMATS[kind], value)

    def raw(self, key: str | bytes, kind: int, payload: bytes) -> GGUFBytes:
        """A pair whose value bytes are given as they are."""
        self.pairs.append(self.string(key) + struct.pack(self.order + "I", kind) + payload)
        return self

    def pair(self, key: str | bytes, kind: int, value: Any) -> GGUFBytes:
        """A scalar or string pair."""
        return self.raw(key, kind, self.value(kind, value))

    def text(self, key: str, value: str | bytes) -> GGUFBytes:
        """A string pair."""
        return self.pair(key, STRING, value)

    def array(self, key: str, kind: int, values: list[Any], count: int | None = None) -> GGUFBytes:
        """An array pair; `count` overrides the true element count."""
        head = struct.pack(self.order + "IQ", kind, len(values) if count is None else count)
        return self.raw(key, ARRAY, head + b"".join(self.value(kind, v) for v in values))

    def tensor(self, name: str, kind: int, ne: list[int], data: bytes, **lies: int) -> GGUFBytes:
        """A tensor; `lies`: offset, n_dims."""
        self.tensors.append(Tensor(name, kind, ne, data, **lies))
        return self

    def build(self) -> bytes:
        """The whole file."""
        count = [len(self.tensors) if self.n_tensors is None else self.n_tensors]
        count.append(len(self.pairs) if self.n_kv is None else self.n_kv)
        out = self.magic + struct.pack(self.order + "IQQ", self.version, *count) + b"".join(self.pairs)
        place, body = 0, b""
        for t in self.tensors:
            out += self.string(t.name) + struct.pack(self.order + "I", len(t.ne) if t.n_dims is None else t.n_dims)
            out += struct.pack(self.order + f"{len(t.ne)}Q", *t.ne)
            out += struct.pack(self.order + "IQ", t.type, place if t.offset is None else t.offset)
            last = t is self.tensors[-1] and not self.pad_last
            padded = t.data if last else self._padded(t.data)
            body += padded
            place += len(padded)
        return (self._padded(out) if self.tensors else out) + body

    def write(self, path: Path) -> Path:
        """Writes the file and gives its path back."""
        path.write_bytes(self.build())
        return path

    def _padded(self, data: bytes) -> bytes:
        return data + b"\x00" * (-len(data) % max(self.align, 1))


def write_shards(folder: Path, base: str, parts: list[GGUFBytes], count: int | None = None) -> list[Path]:
    """Writes parts as `base-00001-of-0000N.gguf` ...; adds split.no, split.count and split.tensors.count (total)."""
    n = len(parts) if count is None else count
    total = sum(len(p.tensors) for p in parts)
    paths = []
    for i, part in enumerate(parts):
        part.pair("split.no", U16, i).pair("split.count", U16, n).pair("split.tensors.count", I32, total)
        paths.append(part.write(folder / f"{base}-{i + 1:05}-of-{len(parts):05}.gguf"))
    return paths
