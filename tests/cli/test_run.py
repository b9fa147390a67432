"""`run` and piped `chat` on a tiny model and the reference backend: one prompt, one answer, nothing else on stdout."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgellm.cli.main import main
from tests.structure.sources import ROOT
from tests.support.tiny import tiny_gguf

FLAGS = ["--backend", "reference", "--seed", "7"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("run") / "tiny.gguf")


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: bytes
    stderr: bytes


class Program:
    """The program in this process: arguments and stdin in, exit code and bytes out."""

    def __init__(self, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch):
        self._capture, self._patch = capsysbinary, monkeypatch
        monkeypatch.setenv("EDGELLM_HOST", "127.0.0.1:9")  # port 9: no server

    def __call__(self, *words: str | Path, stdin: bytes = b"") -> Done:
        self._patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main([str(word) for word in words])
        captured = self._capture.readouterr()
        return Done(code, captured.out, captured.err)


@pytest.fixture
def edgellm(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(capsysbinary, monkeypatch)


def test_run_json_is_the_designs_object(model: Path, edgellm: Program) -> None:
    done = edgellm("run", model, "Hello", "--json", "-n", "6", *FLAGS)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert list(answer) == [
        *("text", "ids", "prompt_tokens", "cached_tokens", "new_tokens", "finish_reason", "ttft_s", "tpot_s"),
        *("load_s", "speculation"),
    ]
    # Template and prompt by hand: <|im_start|> user \n, Hello, <|im_end|> \n, <|im_start|> assistant \n. tiny's merges
    # join only "er" (twice) and "ll", "he" does not apply to "He".
    assert answer["prompt_tokens"] == (1 + 3 + 1) + 4 + (1 + 1) + (1 + 9 + 1)
    assert len(answer["ids"]) == answer["new_tokens"] <= 6
    assert answer["cached_tokens"] == 0 and answer["speculation"] is None
    assert answer["ttft_s"] > 0 and answer["load_s"] > 0


def test_b32_stdin_that_is_no_terminal_is_one_prompt(model: Path, edgellm: Program) -> None:
    lines = b"one\ntwo\nthree\n"
    done = edgellm("chat", model, "-n", "5", *FLAGS, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout and b">>>" not in done.stdout
    expected = edgellm("run", model, lines.decode(), "-n", "5", *FLAGS)
    assert done.stdout == expected.stdout, "the three lines are the same single prompt"


def test_b32_empty_stdin_ends_at_once(model: Path, edgellm: Program) -> None:
    done = edgellm("chat", model, *FLAGS)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_b32_invalid_utf8_is_answered_and_said(model: Path, edgellm: Program) -> None:
    done = edgellm("run", model, "-n", "2", *FLAGS, stdin=b"a\xff")
    assert done.returncode == 0
    assert b"not UTF-8 at byte 1" in done.stderr


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_stdin_without_an_end_is_refused(command: str, model: Path) -> None:
    words = [sys.executable, "-m", "edgellm", command, str(model), *FLAGS]
    with open("/dev/zero", "rb") as endless:
        done = subprocess.run(words, stdin=endless, capture_output=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1 and done.stdout == b""
    assert done.stderr == b"edgellm: stdin holds more than 32 MiB, which is no prompt\n"


def test_the_same_seed_gives_the_same_text_and_temperature_0_needs_none(model: Path, edgellm: Program) -> None:
    texts = {edgellm("run", model, "Hi", "-n", "8", *FLAGS).stdout for _ in range(2)}
    assert len(texts) == 1
    greedy = {edgellm("run", model, "Hi", "-n", "8", "--temperature", "0", *FLAGS[:2]).stdout for _ in range(2)}
    assert len(greedy) == 1


def test_raw_continues_the_text_without_the_template(model: Path, edgellm: Program) -> None:
    done = edgellm("run", model, "ab", "--raw", "--json", "-n", "1", *FLAGS)
    assert json.loads(done.stdout)["prompt_tokens"] == 2


def test_raw_has_no_place_for_a_system_message(model: Path, edgellm: Program) -> None:
    done = edgellm("run", model, "hi", "--raw", "--system", "x", *FLAGS)
    assert done.returncode == 2 and b"--system" in done.stderr


def test_empty_stdin_does_not_hide_a_missing_model(edgellm: Program) -> None:
    done = edgellm("chat", "nosuch", *FLAGS)
    assert done.returncode == 1 and b"no model named nosuch" in done.stderr


def test_what_is_said_names_the_model_as_it_was_asked_for(
    model: Path, edgellm: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    (tmp_path / "Modelfile").write_text(f"FROM {model}\n")
    assert edgellm("create", "mine", "-f", tmp_path / "Modelfile").returncode == 0
    done = edgellm("run", "mine", "hi", "--memory", "1", *FLAGS)
    assert done.returncode == 1 and done.stderr.startswith(b"edgellm: mine needs ")


def test_a_prompt_too_long_is_an_error_with_both_numbers(model: Path, edgellm: Program) -> None:
    done = edgellm("run", model, "a" * 300, *FLAGS)
    assert done.returncode == 1 and done.stdout == b""
    assert re.search(rb"edgellm: .*\b3\d\d tokens.*\b256\b", done.stderr) and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    "flag", [["--temperature", "-1"], ["--temperature", "nan"], ["--top-p", "2"], ["-n", "-5"], ["--ctx", "0"]]
)
def test_a_value_out_of_range_is_wrong_usage(model: Path, flag: list[str], edgellm: Program) -> None:
    done = edgellm("run", model, "Hi", *flag, "--backend", "reference")
    assert done.returncode == 2 and done.stdout == b""
    assert flag[0].encode() in done.stderr and b"Traceback" not in done.stderr


def test_a_model_without_a_template_says_what_is_used_instead(tmp_path: Path, edgellm: Program, caplog) -> None:
    bare = tiny_gguf(tmp_path / "bare.gguf", chat_template=None)
    done = edgellm("run", bare, "Hi", "-n", "2", *FLAGS)
    assert done.returncode == 0
    # pytest takes the log's lines; by itself the program prints them (test_main.py).
    assert [record.getMessage() for record in caplog.records if "no chat template" in record.getMessage()]


def test_turns_of_a_stored_model_that_do_not_fit_are_dropped_and_said(
    model: Path, tmp_path: Path, edgellm: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    turns = "".join(f"MESSAGE user {'question ' * 9}\nMESSAGE assistant {'answer ' * 9}\n" for _ in range(2))
    (tmp_path / "Modelfile").write_text(f"FROM {model}\n{turns}")
    assert edgellm("create", "mine", "-f", tmp_path / "Modelfile").returncode == 0
    for how in ([], ["--json"]):
        done = edgellm("run", "mine", "Hello", "--truncate", "--ctx", "100", "-n", "2", *how, *FLAGS)
        assert done.returncode == 0, done.stderr
        assert b"edgellm: 4 old messages did not fit and were left out\n" in done.stderr
    assert b"left out" not in edgellm("run", "mine", "Hello", "--truncate", "-n", "2", "--ctx", "700", *FLAGS).stderr


def test_ctrl_c_is_130(model: Path) -> None:
    words = [sys.executable, "-m", "edgellm", "run", str(model), "Hi", "-n", "-2", *FLAGS, "--ctx", "100000"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.read(1)  # it answers
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr is not None and b"Traceback" not in process.stderr.read()


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[str]:
    """A real server with the tiny model loaded; its address."""
    words = [sys.executable, "-m", "edgellm", "serve", str(model), "--port", "0", "--backend", "reference"]
    environment = {**os.environ, "EDGELLM_HOME": str(tmp_path)}
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(words, stderr=out, stdout=out, cwd=ROOT, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(rb"serving on http://([\d.:]+)", log.read_bytes())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield found[1].decode()
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_a_running_server_that_has_the_model_is_used_and_said(
    model: Path, server: str, edgellm: Program, monkeypatch
) -> None:
    monkeypatch.setenv("EDGELLM_HOST", server)
    name = model.name.removesuffix(".gguf")
    deadline = time.monotonic() + 60
    while True:
        done = edgellm("run", name, "Hi", "-n", "4", "--seed", "7")
        if done.returncode == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.2)  # it is still loading
    assert done.returncode == 0, done.stderr
    assert f"using the server at http://{server}".encode() in done.stderr
    local = edgellm("run", model, "Hi", "-n", "4", *FLAGS, "--local")
    assert b"using the server" not in local.stderr
    assert done.stdout == local.stdout, "same seed, same words"
    long = edgellm("run", name, "a" * 300)
    assert long.returncode == 1 and b"256" in long.stderr and long.stderr.count(b"\n") == 2
