"""Values and tensors as the reader gives them, against the bytes written and against the `gguf` package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from edgellm.errors import GGUFError
from edgellm.loader import Incomplete, open_gguf, parse_header
from edgellm.quants import QUANT_TABLE, GGMLType
from tests.support.gguf_bytes import BOOL, F32, F32V, F64, I8, I64, STRING, U16, U64, GGUFBytes
from tests.support.real import real_model


def test_quant_table_agrees_with_the_gguf_package() -> None:
    theirs = {t.value: (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    ours = {t.value: (t.name, QUANT_TABLE[t].block_size, QUANT_TABLE[t].type_size) for t in GGMLType}
    assert set(theirs) - set(ours) == set()
    # MXFP4, NVFP4, Q1_0 and Q2_0 are younger than the oldest gguf package that is allowed
    assert {k: v for k, v in ours.items() if k in theirs} == theirs


def test_scalars_and_arrays(tmp_path: Path) -> None:
    words = [f"tok{i}é" for i in range(1000)]
    numbers = np.linspace(-1, 1, 777, dtype="<f4")
    out = GGUFBytes().pair("a", I8, -5).pair("b", U64, 2**64 - 1).pair("c", BOOL, True).pair("d", F64, 0.1)
    out.array("words", STRING, words).array("few", STRING, ["x", ""]).array("numbers", F32V, numbers.tolist())
    out.array("flags", BOOL, [True, False] * 200).array("big", I64, list(range(-300, 300))).array("none", U16, [])
    with open_gguf(out.write(tmp_path / "v.gguf")) as file:
        meta = file.metadata
        assert [meta[k] for k in "abcd"] == [-5, 2**64 - 1, True, 0.1]
        assert meta["few"] == ["x", ""] and meta["none"] == [] and isinstance(meta["few"], list)
        lazy = meta["words"]
        assert len(lazy) == 1000 and lazy[-1] == words[-1] and lazy[5:8] == words[5:8] and list(lazy) == words
        assert lazy == words and lazy != words[:-1] and "tok7é" in lazy and lazy.index("tok9é") == 9
        with pytest.raises(IndexError):
            lazy[1000]
        assert list(meta["numbers"]) == numbers.tolist() and meta["numbers"][3] == float(numbers[3])
        assert np.asarray(meta["numbers"]).dtype == np.float32 and meta["numbers"][:2] == numbers[:2].tolist()
        assert list(meta["flags"]) == [True, False] * 200 and meta["flags"][0] is True
        assert meta["big"] == list(range(-300, 300)) and isinstance(meta["big"][0], int)
        assert meta.type_of("words") == "string[1000]" and meta.type_of("a") == "int8"
        assert meta.get("absent") is None and "absent" not in meta and len(meta) == 10


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    out = GGUFBytes().text("t", b"a\xff").array("words", STRING, [b"\xe6\x97", b"ok"] * 200)
    with open_gguf(out.write(tmp_path / "u.gguf")) as file:
        assert file.metadata["t"] == "a\ufffd"
        assert file.metadata["words"][0].encode("utf-8", "surrogateescape") == b"\xe6\x97"
    bad_key = GGUFBytes().text(b"\xff\n", "x")  # type: ignore[arg-type]
    with pytest.raises(GGUFError, match="metadata key 0 is not UTF-8"):
        open_gguf(bad_key.write(tmp_path / "k.gguf"))


def test_a_file_by_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"t{i}" for i in range(500)])
    writer.add_float32("x.y", 0.5)
    rng = np.random.default_rng(7)
    weights = {f"blk.{i}.w": rng.standard_normal((3, 64)).astype(np.float32) for i in range(4)}
    for name, w in weights.items():
        writer.add_tensor(name, w)
    quantised = gguf.quants.quantize(weights["blk.0.w"], gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(path) as file:
        assert (
            file.architecture == "llama"
            and file.metadata["x.y"] == 0.5
            and file.metadata["tokenizer.ggml.tokens"][499] == "t499"
        )
        for name, w in weights.items():
            assert np.array_equal(file.tensors[name].data.view(np.float32), w)
        assert file.tensors["q"].type is GGMLType.Q8_0 and np.array_equal(file.tensors["q"].data, quantised)


def test_tensors_are_views_that_outlive_close(tmp_path: Path) -> None:
    path = GGUFBytes().tensor("t", F32, [4], np.ones(4, "<f4").tobytes()).write(tmp_path / "t.gguf")
    file = open_gguf(path)
    data = file.tensors["t"].data
    assert not data.flags.owndata and not data.flags.writeable
    file.close()
    assert data.view(np.float32).tolist() == [1, 1, 1, 1] and len(file.tensors) == 0


def test_digest_tells_files_apart(tmp_path: Path) -> None:
    def digest(name: str, value: float) -> str:
        body = np.full(4, value, "<f4").tobytes()
        return open_gguf(GGUFBytes().tensor("t", F32, [4], body).write(tmp_path / name)).digest

    assert digest("a", 1) == digest("b", 1) != digest("c", 2)


def test_header_from_a_prefix_says_what_it_needs() -> None:
    data = GGUFBytes().array("words", STRING, ["ab"] * 50).tensor("t", F32, [4], b"\0" * 16).build()
    have, rounds = 0, 0
    while True:
        try:
            header = parse_header(data[:have], len(data), "remote")
            break
        except Incomplete as short:
            assert have < short.needed <= len(data)
            have, rounds = short.needed, rounds + 1
    assert header.tensors[0].name == "t" and header.metadata["words"] == ["ab"] * 50 and have == header.header_bytes


def test_missing_architecture(tmp_path: Path) -> None:
    with open_gguf(GGUFBytes().write(tmp_path / "n.gguf")) as file, pytest.raises(GGUFError, match="architecture"):
        _ = file.architecture


@pytest.mark.real
def test_opening_a_large_vocabulary_is_lazy() -> None:
    """Work is counted, not timed: opening may not decode the strings of the big arrays."""
    with open_gguf(real_model("gemma3-270m.gguf")) as file:
        assert file.metadata.type_of("tokenizer.ggml.tokens") == "string[262144]"
        assert not isinstance(file.metadata["tokenizer.ggml.tokens"], list)
