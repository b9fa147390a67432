"""Cases B01 to B04: damaged and malicious files end in one line that names what is wrong; odd but sound files load."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from edgellm.errors import GGUFError, ModelNotFound
from edgellm.loader import open_gguf
from tests.support.gguf_bytes import F32, F32V, I32, Q4_1, Q4_K, STRING, U8, U32, U64, GGUFBytes
from tests.support.sandbox import open_in_sandbox

FLOATS = np.arange(8, dtype="<f4")


def sound(align: int = 32, **options: object) -> GGUFBytes:
    """A file with one text, one array and two tensors of known floats."""
    out = GGUFBytes(align=align, **options).text("general.architecture", "llama")  # type: ignore[arg-type]
    if align != 32:
        out.pair("general.alignment", U32, align)
    out.array("a.list", I32, [1, -2, 3])
    out.tensor("t.weight", F32, [4, 2], FLOATS.tobytes())
    return out.tensor("u.weight", F32, [3], FLOATS[:3].tobytes())


def error_of(data: bytes, tmp_path: Path) -> str:
    """The message of the error that opening `data` ends in."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400 and str(path) in message
    return message


HUGE_COUNTS = {
    "n_kv": (GGUFBytes(n_kv=1 << 60).build(), "metadata count"),
    "n_tensors": (GGUFBytes(n_tensors=1 << 60).build(), "tensor count"),
    "both": (GGUFBytes(n_kv=(1 << 64) - 1, n_tensors=(1 << 64) - 1).build(), "count"),
    "string": (GGUFBytes().raw("k", STRING, struct.pack("<Q", (1 << 63) - 1)).build(), "'k'"),
    "string_wraps": (GGUFBytes().raw("k", STRING, struct.pack("<Q", (1 << 64) - 8)).build(), "'k'"),
    "key": (GGUFBytes(n_kv=1).build() + struct.pack("<Q", 1 << 62) + b"abcdefgh", "metadata key 0"),
    "array_type": (GGUFBytes().array("k", 99, [], count=1 << 60).build(), "unknown type number 99"),
    "array_u8": (GGUFBytes().array("k", U8, [], count=1 << 60).build(), "'k'"),
    "array_strings": (GGUFBytes().array("k", STRING, [], count=1 << 60).build(), "'k'"),
    "array_nested": (GGUFBytes().array("k", 9, [], count=1 << 60).build(), "array of arrays"),
    "value_type": (GGUFBytes().raw("k", 13, b"\0" * 8).build(), "unknown type number 13"),
    "inner_string": (GGUFBytes().array("k", STRING, ["ab", "cd"]).build()[:-10] + b"\xff" * 10, "string"),
}


def test_b01_counts_and_lengths_in_the_header_do_not_drive_allocation(tmp_path: Path) -> None:
    paths = []
    for name, (data, _) in HUGE_COUNTS.items():
        assert len(data) < 100
        paths.append(tmp_path / f"{name}.gguf")
        paths[-1].write_bytes(data)
    for path, result in zip(paths, open_in_sandbox(*paths), strict=True):
        assert result["kind"] == "GGUFError", (path.name, result)
        assert HUGE_COUNTS[path.stem][1] in result["message"] and "\n" not in result["message"]
        assert result["grown"] < 10 << 20, (path.name, result)


def test_b01_a_sparse_file_full_of_empty_strings_ends_soon(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(GGUFBytes().array("k", STRING, [], count=1 << 25).build())
    os.truncate(path, 300 << 20)
    (result,) = open_in_sandbox(path)
    assert result["kind"] == "GGUFError" and "most that is accepted" in result["message"]


def test_b02_empty_key(tmp_path: Path) -> None:
    data = GGUFBytes().pair("", U8, 1).build()
    assert len(data) == 37
    assert "metadata key 0 is empty" in error_of(data, tmp_path)


def test_b02_repeated_key(tmp_path: Path) -> None:
    data = GGUFBytes().text("general.architecture", "llama").text("general.architecture", "gemma").build()
    assert "'general.architecture' appears twice" in error_of(data, tmp_path)


def test_b02_repeated_tensor(tmp_path: Path) -> None:
    data = sound().tensor("t.weight", F32, [4, 2], FLOATS.tobytes()).build()
    assert "'t.weight' appears twice" in error_of(data, tmp_path)


def test_b03_zero_dimension_is_an_empty_tensor(tmp_path: Path) -> None:
    path = sound().tensor("z.weight", F32, [4, 0], b"").tensor("y.weight", F32, [0, 4], b"").write(tmp_path / "z.gguf")
    with open_gguf(path) as file:
        assert file.tensors["z.weight"].shape == (0, 4) and file.tensors["z.weight"].data.shape == (0, 16)
        assert file.tensors["y.weight"].shape == (4, 0) and file.tensors["y.weight"].nbytes == 0
    data = sound().tensor("z.weight", F32, [1 << 62, 0, 1 << 40], b"").build()
    assert "'z.weight'" in error_of(data, tmp_path)


@pytest.mark.parametrize("value", [0, 3, 48, (1 << 32) - 1])
def test_b03_alignment_must_be_a_power_of_two(value: int, tmp_path: Path) -> None:
    data = GGUFBytes().pair("general.alignment", U32, value).tensor("t", F32, [8], FLOATS.tobytes()).build()
    assert f"general.alignment must be a power of two, not {value}" in error_of(data, tmp_path)


@pytest.mark.parametrize(("kind", "value"), [(U64, 64), (STRING, "64"), (I32, 64), (F32V, 64.0)])
def test_b03_alignment_must_be_u32(kind: int, value: object, tmp_path: Path) -> None:
    data = GGUFBytes().pair("general.alignment", kind, value).tensor("t", F32, [8], FLOATS.tobytes()).build()
    assert "general.alignment must be a uint32" in error_of(data, tmp_path)


@pytest.mark.parametrize("align", [1, 8, 32, 64, 4096])
@pytest.mark.parametrize("version", [2, 3])
def test_b03_any_sound_alignment_reads_the_same_values(align: int, version: int, tmp_path: Path) -> None:
    with open_gguf(sound(align, version=version).write(tmp_path / "a.gguf")) as file:
        tensor = file.tensors["t.weight"]
        assert tensor.shape == (2, 4) and tensor.data.shape == (2, 16) and tensor.row_bytes == 16
        assert tensor.data.reshape(-1).view("<f4").tolist() == FLOATS.tolist()
        assert file.tensors["u.weight"].data.view("<f4").tolist() == [0.0, 1.0, 2.0]
        assert file.version == version and file.nbytes == 44


@pytest.mark.parametrize("padded_to", [1, 8, 32])
def test_b03_alignment_that_the_data_does_not_follow(padded_to: int, tmp_path: Path) -> None:
    for filler in range(64):  # wherever the header ends
        data = GGUFBytes(align=padded_to).text("k", "x" * filler).pair("general.alignment", U32, 64)
        data.tensor("t.weight", F32, [4], FLOATS[:4].tobytes()).tensor("u.weight", F32, [4], FLOATS[:4].tobytes())
        assert ".weight'" in error_of(data.build(), tmp_path)


def test_b04_any_cut_is_seen(tmp_path: Path) -> None:
    data = sound().build()
    end = len(data) - 20  # the last tensor has 12 bytes and 20 of padding
    message = error_of(data[: end - 1], tmp_path)
    assert "tensor 'u.weight'" in message and "1 bytes are missing" in message
    for size in range(len(data)):
        if size != end:  # a file without padding after the last tensor is sound
            assert error_of(data[:size], tmp_path)
    (tmp_path / "whole.gguf").write_bytes(data[:end])
    assert open_gguf(tmp_path / "whole.gguf").tensors["u.weight"].nbytes == 12


@pytest.mark.parametrize("offset", [0, 33, 64, 1 << 40, (1 << 64) - 32])
def test_b04_bad_offset(offset: int, tmp_path: Path) -> None:
    data = GGUFBytes().tensor("t.weight", F32, [8], FLOATS.tobytes())
    data.tensor("u.weight", F32, [8], FLOATS.tobytes(), offset=offset)
    assert "'u.weight'" in error_of(data.build(), tmp_path)


@pytest.mark.parametrize(("kind", "width", "block"), [(Q4_K, 576, 256), (Q4_1, 33, 32)])
def test_b04_ragged_rows(kind: int, width: int, block: int, tmp_path: Path) -> None:
    message = error_of(GGUFBytes().tensor("t.weight", kind, [width, 2], b"\0" * 4096).build(), tmp_path)
    assert "'t.weight'" in message and str(width) in message and f"blocks of {block}" in message


def test_b04_files_that_are_something_else(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 98362432\n"
    assert "LFS" in error_of(pointer, tmp_path) and "not a GGUF" in error_of(pointer, tmp_path)
    assert "empty" in error_of(b"", tmp_path)
    assert "web page" in error_of(b"<!DOCTYPE html><html>", tmp_path)
    assert "safetensors" in error_of(struct.pack("<Q", 20) + b'{"a": 1}', tmp_path)
    assert "not a GGUF" in error_of(b"G", tmp_path)
    with pytest.raises(ModelNotFound, match="no such file"):
        open_gguf(tmp_path / "missing.gguf")
    with pytest.raises(GGUFError, match="folder"):
        open_gguf(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GGUFError, match="regular"):
        open_gguf(tmp_path / "pipe")


def test_b04_big_endian_and_other_versions(tmp_path: Path) -> None:
    swapped = GGUFBytes(order=">").text("general.architecture", "llama").build()
    assert struct.unpack_from("<I", swapped, 4)[0] == 50331648
    assert "byte order" in error_of(swapped, tmp_path)
    for version in (0, 1, 4, 99):
        assert f"version {version}" in error_of(sound(version=version).build(), tmp_path)


@pytest.mark.parametrize(("number", "words"), [(4, "Q4_2"), (33, "Q4_0_8_8"), (43, "unknown"), (1 << 31, "unknown")])
def test_unknown_and_removed_tensor_types(number: int, words: str, tmp_path: Path) -> None:
    message = error_of(GGUFBytes().tensor("t.weight", number, [256], b"\0" * 256).build(), tmp_path)
    assert "'t.weight'" in message and words in message


def test_too_many_dimensions(tmp_path: Path) -> None:
    message = error_of(GGUFBytes().tensor("t.weight", F32, [1] * 5, b"\0" * 4).build(), tmp_path)
    assert "'t.weight' has 5 dimensions" in message
    data = GGUFBytes().tensor("t.weight", F32, [1 << 31, 1 << 31, 1 << 31, 1 << 31], b"").build()
    assert "more bytes than any file" in error_of(data, tmp_path)
