"""`tokenize` and `show` on files: what they print, and how they fail."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from edgellm.cli.main import main
from edgellm.server.gguf_details import read_details
from tests.support.gguf_bytes import BOOL, F32V, I32, STRING, U32, GGUFBytes
from tests.support.tiny import tiny_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # One line of the name would clear the screen if it reached a terminal as it is.
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(tiny_gguf(path, metadata={"general.name": "tiny\x1b[2J", "general.license": "cc0-1.0"}))


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data), encoding="utf-8")


def run_json(capsys: pytest.CaptureFixture[str], *words: str):
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


def test_tokenize_gives_ids_and_stored_tokens(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    # tests/support/tiny.py: 3 control tokens, 256 bytes in order, merges. "t h" is the first, so "Ġt h" cannot apply.
    ids = [3 + ord("a"), 3 + ord(" "), 3 + 256, 3 + ord("e")]
    assert run_json(capsys, "tokenize", model, "a the") == {"ids": ids, "tokens": ["a", "Ġ", "th", "e"]}


def test_tokenize_takes_control_tokens_as_text_unless_asked(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "tokenize", model, "<|im_end|>", "--special")["ids"] == [2]
    assert len(run_json(capsys, "tokenize", model, "<|im_end|>")["ids"]) == 10
    assert run_json(capsys, "tokenize", model, "a", "--bos")["ids"][0] == 0


def test_tokenize_reads_stdin_byte_for_byte(model: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(b"a\r\n"))
    assert run_json(capsys, "tokenize", model)["ids"] == [3 + ord("a"), 3 + ord("\r"), 3 + ord("\n")]


def test_stdin_that_is_not_utf8_is_said(model: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(b"a\xffb"))
    assert main(["tokenize", model, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "edgellm: stdin is not UTF-8 at byte 1; such bytes are read as U+FFFD\n"
    assert json.loads(captured.out)["ids"] == [3 + byte for byte in b"a\xef\xbf\xbdb"]


def test_show_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = run_json(capsys, "show", model)
    assert facts["architecture"] == "llama"
    assert facts["supported"] is True
    assert (facts["layers"], facts["heads"], facts["kv_heads"], facts["embedding_length"]) == (2, 4, 2, 64)
    assert facts["context_length"] == 256
    assert facts["tokenizer"]["vocabulary"] == 300
    assert facts["file_bytes"] == Path(model).stat().st_size
    # Embedding, two layers of q, o (64 x 64), k, v (32 x 64), three of 96 x 64 and two norms; the last norm.
    assert facts["parameters"] == 300 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64) + 64


def test_show_prints_a_table_without_control_characters(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", model]) == 0
    out = capsys.readouterr().out
    rows = dict(line.split(None, 1) for line in out.splitlines())
    assert rows["architecture"] == "llama" and rows["license"] == "cc0-1.0"
    assert rows["name"] == "tiny␛[2J"
    assert "\x1b" not in out


def test_show_template(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", model, "--template"]) == 0
    assert capsys.readouterr().out.startswith("{% for m in messages %}")


def test_show_tells_what_is_stored_beside_the_weights(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    text = f'FROM {model}\nPARAMETER temperature 0.25\nPARAMETER stop "\\n"\nSYSTEM "Be\x1b[2J brief."\n'
    text += 'TEMPLATE "{{ messages[0].content }}"\nMESSAGE user Hi\n'
    (tmp_path / "Modelfile").write_text(text)
    assert main(["create", "mine", "-f", str(tmp_path / "Modelfile")]) == 0
    capsys.readouterr()
    facts = run_json(capsys, "show", "mine")
    assert facts["options"] == {"temperature": 0.25, "stop": ["\\n"]}
    assert facts["system"] == "Be\x1b[2J brief." and facts["messages"] == [{"role": "user", "content": "Hi"}]
    assert main(["show", "mine", "--template"]) == 0
    assert capsys.readouterr().out == "{{ messages[0].content }}\n"
    assert main(["show", "mine"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and {"temperature", "stop", "system", "user"} <= {
        line.split()[0] for line in printed.splitlines()
    }
    assert main(["show", "mine", "--modelfile"]) == 0
    (tmp_path / "Again").write_text(capsys.readouterr().out)
    assert main(["create", "again", "-f", str(tmp_path / "Again")]) == 0
    capsys.readouterr()
    again = run_json(capsys, "show", "again")
    assert {**again, "path": ""} == {**facts, "path": ""}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((STRING, "x"), (U32, 5), (I32, -1), (F32V, 1.5), (F32V, float("nan")), (BOOL, 1), (U32, 0)),
        *((STRING, ["a"]), (I32, [1, 2]), (STRING, [])),
    ],
)
@pytest.mark.parametrize(
    "key",
    [
        *("tokenizer.chat_template", "tokenizer.ggml.tokens", "tokenizer.ggml.bos_token_id", "general.name"),
        *("general.file_type", "llama.context_length", "llama.embedding_length", "llama.attention.sliding_window"),
    ],
)
def test_metadata_of_any_type_can_be_shown(
    key: str, kind: int, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = GGUFBytes().text("general.architecture", "llama")
    path = (file.array if isinstance(value, list) else file.pair)(key, kind, value).write(tmp_path / "m.gguf")
    for words in ([], ["--json"], ["--template"]):
        assert main(["show", str(path), *words]) == 0, capsys.readouterr().err
    assert isinstance(read_details(path).context_length, int)


def test_show_says_why_an_architecture_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"lxama"))
    facts = run_json(capsys, "show", str(path))
    assert facts["architecture"] == "lxama"
    assert facts["supported"] is False and "lxama" in facts["unsupported_reason"]


@pytest.mark.parametrize("command", [["show"], ["tokenize"], ["run", "x"]])
@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"GGML" + bytes(100), b"GGUF\x03\0\0\0" + b"\xff" * 16])
def test_a_bad_file_is_one_line_and_exit_1(
    command, content, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    assert main([command[0], str(path), *command[1:]]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("edgellm: ") and captured.err.count("\n") == 1
    assert "bad.gguf" in captured.err


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _dangling(path: Path) -> None:
    path.symlink_to("elsewhere.gguf")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_loop, os.strerror(errno.ELOOP)),
        (_dangling, "no such file: it is a link to elsewhere.gguf, which is not there"),
        (Path.mkdir, "is a folder; give the .gguf file in it"),
        (os.mkfifo, "is not a regular file"),
    ],
)
@pytest.mark.parametrize("words", [["run", "M", "x"], ["chat", "M"], ["serve", "M", "--port", "0"], ["create", "c"]])
def test_a_path_that_is_no_file_says_what_it_is(
    make, reason: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdin", Stdin(b""))
    path = tmp_path / "model.gguf"
    make(path)
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(f"FROM {path}\n")
    words = [str(path) if word == "M" else word for word in words]
    assert main([*words, *(["-f", str(modelfile)] if words[0] == "create" else [])]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "model.gguf: " in captured.err and reason in captured.err


@pytest.mark.parametrize("words", [["show"], ["run", "x"], ["serve"]])
def test_the_home_of_a_user_that_is_not_there(words, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    assert main([words[0], "~nosuchuser/model.gguf", *words[1:]]) == 1
    assert "no such user" in capsys.readouterr().err
    monkeypatch.setenv("EDGELLM_HOME", "~nosuchuser")
    assert main([words[0], "name", *words[1:]]) == 1
    captured = capsys.readouterr()
    assert captured.err == "edgellm: EDGELLM_HOME is '~nosuchuser', but there is no such user\n"


def test_a_user_without_a_home(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "EDGELLM_HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    said = "edgellm: this user has no home folder: set EDGELLM_HOME to a folder for models and kernels\n"
    assert main(["list"]) == 1
    assert capsys.readouterr().err == said
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    for store in ({}, {"OLLAMA_MODELS": "~nosuchuser/models", "HF_HOME": "~nosuchuser/hf"}):
        for name, value in store.items():
            monkeypatch.setenv(name, value)
        assert main(["list"]) == 0
        assert "bug" not in capsys.readouterr().err


def test_a_file_without_the_ending_is_opened_by_its_path(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model.bin", "my model"):
        Path(name).symlink_to(model)
        assert main(["show", name]) == 1
        hint = f"edgellm: no model has the name {name}; for the file of that name write ./{name}\n"
        assert capsys.readouterr().err == hint
        assert main(["show", f"./{name}"]) == 0


def test_a_link_that_was_not_pulled_says_how_to_get_it(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch):
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    assert main(["run", "https://example.com/x.gguf", "hi"]) == 1
    assert "get it with: edgellm pull https://example.com/x.gguf\n" in capsys.readouterr().err


def test_an_unknown_name_says_how_to_get_it(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "none"))
    assert main(["show", "no-such-model"]) == 1
    assert "edgellm pull no-such-model" in capsys.readouterr().err
