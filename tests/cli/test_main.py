"""The program's frame: the table of commands, exit codes, errors as one line, fast start."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from edgellm.cli import main as program
from edgellm.errors import GGUFError
from tests.support.tiny import tiny_gguf

DESIGN_COMMANDS = [
    *("chat", "run", "serve", "pull", "create", "list", "show", "rm", "cp", "verify", "ps", "stop", "plan"),
    *("check-pair", "tokenize", "perplexity", "bench", "doctor"),
]


@pytest.fixture
def failing_command(monkeypatch: pytest.MonkeyPatch):
    """Registers a command `fail` that raises what the test puts into the returned list."""
    errors: list[BaseException] = []

    @click.command()
    def fail() -> None:
        raise errors[0]

    monkeypatch.setattr(program, "fail", fail, raising=False)
    monkeypatch.setitem(program.COMMANDS, "fail", ("edgellm.cli.main:fail", "Fails."))
    return errors


def test_every_command_of_the_design_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--help"]) == 0
    listed = [
        line.split()[0] for line in capsys.readouterr().out.partition("Commands:")[2].splitlines() if line.strip()
    ]
    assert listed == DESIGN_COMMANDS


@pytest.mark.parametrize("command", DESIGN_COMMANDS)
def test_every_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([command, "--help"]) == 0
    assert f"Usage: edgellm {command}" in capsys.readouterr().out


def test_an_error_for_the_user_is_one_line_and_exit_1(failing_command, capsys: pytest.CaptureFixture[str]) -> None:
    failing_command.append(GGUFError("x.gguf: cut short\nin the middle"))
    assert program.main(["fail"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "edgellm: x.gguf: cut short in the middle\n")


@pytest.mark.parametrize("words", [["--debug", "fail"], ["fail", "--debug"]])
def test_debug_shows_the_traceback_and_the_line(failing_command, words, capsys: pytest.CaptureFixture[str]) -> None:
    failing_command.append(GGUFError("cut short"))
    assert program.main(words) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("edgellm: cut short\n")


def test_a_bug_is_named_as_one(failing_command, capsys: pytest.CaptureFixture[str]) -> None:
    failing_command.append(KeyError("k"))
    assert program.main(["fail"]) == 1
    assert capsys.readouterr().err == (
        "edgellm: a bug in edgellm: KeyError: 'k' (run again with --debug for the traceback)\n"
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "out of memory: the system gives no more; ask for less with --memory or --ctx"),
        (MemoryError("1 GiB"), "out of memory: 1 GiB; ask for less with --memory or --ctx"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_what_the_system_refuses_is_no_bug(
    failing_command, error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_command.append(error)
    assert program.main(["fail"]) == 1
    assert capsys.readouterr().err == f"edgellm: {line}\n"


def test_an_interrupt_is_130(failing_command) -> None:
    failing_command.append(KeyboardInterrupt())
    assert program.main(["fail"]) == 130


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["run"],
        ["run", "demo", "hi", "-n", "many"],
        ["--nonsense"],
        ["bench", "demo", "--depth", "0,-1"],
        ["bench", "demo", "--batch", "0"],
        ["bench", "demo", "--batch", "1,65"],
        ["serve", "--keep-alive", "abc"],
        ["plan", "demo", "--memory", "-1"],
    ],
)
def test_wrong_usage_is_2(words, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(words) == 2
    assert "Usage: edgellm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["run", "m.gguf", "a\udcff"], "PROMPT"),
        (["run", "m.gguf", "hi", "--system", "a\udcff"], "--system"),
        (["chat", "m.gguf", "--system", "a\udcff"], "--system"),
        (["tokenize", "m.gguf", "a\udcff"], "TEXT"),
    ],
)
def test_text_that_is_not_utf8_is_wrong_usage(words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert name in captured.err.splitlines()[-1] and captured.err.endswith("it is not UTF-8 at byte 1\n")


def test_a_reader_that_went_away_is_no_traceback() -> None:
    code = "import sys; from edgellm.cli.main import main; sys.exit(main(['--help']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) in (0, 1)
    assert process.stderr.read() == b""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_the_caller_closed_is_nobodys(closed: str, tmp_path: Path) -> None:
    model = tiny_gguf(tmp_path / "tiny.gguf")
    words = [sys.executable, "-m", "edgellm", "chat", str(model), "--backend", "reference", "-n", "2"]
    done = subprocess.run(["sh", "-c", f"exec {shlex.join(words)} {closed}"], capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stderr == b""


def test_a_warning_of_the_library_is_a_line_on_stderr() -> None:
    code = (
        "import logging; from edgellm.cli.main import main;"
        "main(['show', 'x.gguf']); logging.getLogger('edgellm').warning('w')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines()[-1] == "edgellm: w"


def test_help_and_import_load_nothing_heavy() -> None:
    code = (
        "import sys, edgellm; plain = set(sys.modules); from edgellm.cli.main import main; main(['--help']);"
        "heavy = {'numpy', 'numba', 'llvmlite', 'rich', 'prompt_toolkit', 'httpx', 'jinja2', 'tokenizers', 'pydantic'};"
        "print('LOADED', sorted(heavy & set(sys.modules)), 'click' in plain)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED [] False"
