"""Modelfiles, `create`, and the scan for NaN."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import EdgeLLMError, ModelNotFound, RequestError, StoreError, TemplateError, UnsupportedModel
from edgellm.hub.create import create
from edgellm.hub.modelfile import Modelfile, format_modelfile, parse_modelfile
from edgellm.hub.store import Store, find
from edgellm.hub.verify import scan_tensor, verify
from edgellm.loader import open_gguf
from edgellm.quants import QUANT_TABLE, GGMLType
from tests.support.gguf_bytes import F32, GGUFBytes, write_shards
from tests.support.hubs import model_file

TEXT = '''# a comment
FROM ./m.gguf
PARAMETER temperature 0.25
parameter stop "<end>"
PARAMETER stop """a b"""
PARAMETER num_ctx 4096
SYSTEM """You are
terse."""
TEMPLATE """{% for m in messages %}{{ m.content }}{% endfor %}"""
MESSAGE user Hello there
MESSAGE assistant "Hi"
LICENSE """MIT
Copyright"""
LICENSE Second
'''


def test_create_leaves_room_on_the_disk(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, usage = model_file(tmp_path / "m.gguf", 4096), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(StoreError, match=r"no space: m\.gguf needs"):
        create("m", Modelfile(str(path)), tmp_path, store)
    assert not store.partial.exists()


def test_create_from_a_file(store: Store, tmp_path: Path) -> None:
    path = model_file(tmp_path / "m.gguf", 4096)
    made = create("Mine", parse_modelfile(TEXT), tmp_path, store)
    assert made.path.read_bytes() == path.read_bytes() and str(made.name) == "Mine:latest"
    assert made.params == {"temperature": 0.25, "stop": ["<end>", "a b"], "num_ctx": 4096}
    assert made.system == "You are\nterse." and made.template == "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert made.messages == ({"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"})
    assert made.license == ("MIT\nCopyright", "Second")
    path.unlink()
    child = create("child", parse_modelfile("FROM mine\nPARAMETER top_k 7\nSYSTEM Other"), tmp_path, store)
    assert child.path == made.path and child.system == "Other" and child.template == made.template
    assert child.params == {"temperature": 0.25, "stop": ["<end>", "a b"], "num_ctx": 4096, "top_k": 7}
    assert find("CHILD", store) == child
    assert list(store.partial.iterdir()) == []


def test_create_from_a_split_model(store: Store, tmp_path: Path) -> None:
    parts = [GGUFBytes().text("general.architecture", "llama"), GGUFBytes()]
    for i, part in enumerate(parts):
        part.tensor(f"t{i}", F32, [4], bytes(16))
    paths = write_shards(tmp_path, "m", parts)
    made = create("split", parse_modelfile(f"FROM {paths[0]}"), tmp_path, store)
    with open_gguf(made.path) as file:
        assert sorted(file.tensors) == ["t0", "t1"]


BAD = {
    "": "no FROM",
    "FROM": "without a value",
    "FROM a\nFROM b": "second FROM",
    "FROM a\nFOO bar": "line 2 .*'FOO' is no instruction",
    "FROM a\nPARAMETER nonsense 1": "unknown parameter 'nonsense'",
    "FROM a\nPARAMETER top_k many": "'many' is no value for top_k",
    "FROM a\nPARAMETER temperature nan": "no value for temperature",
    'FROM a\nSYSTEM """open': "without an end",
    "FROM a\nMESSAGE robot hi": "the role must be",
}


def test_what_a_modelfile_says_can_be_written_and_read_again() -> None:
    made = Modelfile(
        source="tiny:latest",
        params={"temperature": 0.5, "stop": ["\n\n", " x ", 'say "hi"', "<|end|>"], "num_ctx": 64, "use_mmap": True},
        template="{{ messages }}\nline",
        system="Be brief.\n\nVery.",
        messages=[{"role": "user", "content": "Hi\nthere"}, {"role": "assistant", "content": " Yes? "}],
        license=["Free.", "# no comment\nof ours"],
    )
    assert parse_modelfile(format_modelfile(made)) == made


@pytest.mark.parametrize("text", ['"', '""', 'a"""', 'a\n"', '"a\nb""""', '""a', "", "\n", ' "a" '])
def test_quotes_at_the_ends_of_a_text_are_read_again(text: str) -> None:
    message = {"role": "user", "content": text}
    made = Modelfile("tiny", {"stop": [text]}, template=text, system=text, license=[text], messages=[message])
    assert parse_modelfile(format_modelfile(made)) == made


def test_three_quotes_within_a_text_are_named_instead_of_written() -> None:
    made = Modelfile("tiny", system='a\n"""\nSYSTEM b', messages=[{"role": "user", "content": 'a """ b'}])
    assert format_modelfile(made).splitlines() == [
        "FROM tiny",
        "# SYSTEM: left out, its text has three quotes in it",
        "# MESSAGE user: left out, its text has three quotes in it",
    ]


def test_tabs_part_words_as_spaces_do() -> None:
    read = parse_modelfile('FROM\tx\nPARAMETER\t temperature\t0.5\nMESSAGE\tuser\thi\nSYSTEM\t"a\tb"\n')
    assert (read.source, read.params, read.system) == ("x", {"temperature": 0.5}, "a\tb")
    assert read.messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("text", BAD)
def test_bad_modelfiles(text: str) -> None:
    with pytest.raises(RequestError, match=BAD[text]):
        parse_modelfile(text)


def test_what_is_explained() -> None:
    with pytest.raises(UnsupportedModel, match="merge the adapter"):
        parse_modelfile("FROM a\nADAPTER ./lora.gguf")
    with pytest.raises(TemplateError, match="Go template"):
        parse_modelfile('FROM a\nTEMPLATE """{{ if .System }}<|s|>{{ .System }}{{ end }}"""')
    with pytest.raises(TemplateError, match="does not parse"):
        parse_modelfile('FROM a\nTEMPLATE """{% if %}"""')
    assert parse_modelfile("FROM a\nRENDERER qwen3").notes == ["RENDERER is Ollama's own and has no effect in edgellm"]


def test_what_is_not_here(store: Store, tmp_path: Path) -> None:
    for source in ("./none.gguf", "/none/x.gguf", "none"):
        with pytest.raises(ModelNotFound):
            create("x", parse_modelfile(f"FROM {source}"), tmp_path, store)
    (tmp_path / "bad.gguf").write_text("no model")
    with pytest.raises(EdgeLLMError, match="not a GGUF file"):
        create("x", parse_modelfile("FROM ./bad.gguf"), tmp_path, store)
    assert store.names() == []


@given(st.text(alphabet='FROMPARETSYMLIC "\n#abc{}%.$0', max_size=80).map(lambda t: "FROM a\n" + t))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        parse_modelfile(text)
    except EdgeLLMError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("kind", sorted(set(GGMLType) - {GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64}))
def test_scan_sees_a_nan_scale_where_dequantising_gives_one(kind: GGMLType, tmp_path: Path) -> None:
    """All bits of one block set: a NaN scale wherever the type has float scales. The `gguf` package agrees."""
    import gguf

    info = QUANT_TABLE[kind]
    data = np.zeros((4, info.type_size), np.uint8)
    data[2] = 0xFF
    path = GGUFBytes().tensor("t", int(kind), [info.block_size, 4], data.tobytes()).write(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        found = scan_tensor(file.tensors["t"])
        data[2] = 0
        clean = GGUFBytes().tensor("t", int(kind), [info.block_size, 4], data.tobytes()).write(tmp_path / "c.gguf")
        assert scan_tensor(open_gguf(clean).tensors["t"]) in (0, None)
    if found is None:
        return
    assert found > 0
    data[2] = 0xFF
    try:
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(int(kind)))
    except (NotImplementedError, ValueError):  # a type that the package cannot dequantise, or is too old to know
        return
    assert not np.isfinite(values[2]).all() and np.isfinite(values[[0, 1, 3]]).all()
    assert verify(str(path), scan=True).problems == [f"tensor t: {found} scales are NaN or infinite"]
