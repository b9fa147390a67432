"""The REPL at a real pseudo-terminal, with a scripted partner. What it was sent is read from the partner's own log."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellm.cli.prompt import quotes_are_open, unquote

pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed (pip install -e .[test])")

ROOT = Path(__file__).parents[2]
ANSI = re.compile(r"\x1b[\[\]()][0-9;?]*[A-Za-z]?|\x1b[=>78M]|[\x00-\x08\x0b\x0c\x0e-\x1f]")


class Terminal:
    """One REPL in a pty."""

    def __init__(self, tmp_path: Path, *pieces: str, program: str | None = None, term: str = "xterm"):
        self.log = tmp_path / "log.jsonl"
        self.home = tmp_path / "home"
        environment = {**os.environ, "EDGELLM_HOME": str(self.home), "TERM": term}
        command = program or f"exec {sys.executable} -m tests.cli.scripted_repl {self.log} {' '.join(pieces)}"
        self.child = pexpect.spawn(
            "/bin/sh",
            ["-c", command],
            env=environment,
            cwd=str(ROOT),
            encoding="utf-8",
            timeout=30,
            dimensions=(30, 100),
        )
        self.child.delaybeforesend = None

    def ready(self) -> None:
        """Wait for a new prompt: it begins with marking pastes, which drawing the line again does not."""
        self.child.expect_exact("\x1b[?2004h")
        self.child.expect_exact(">>> ")

    def type(self, keys: str) -> None:
        self.child.send(keys)

    def ask(self, keys: str, answer: str = "pong") -> None:
        """Type, wait for the answer and for the next prompt."""
        self.type(keys + "\r")
        self.child.expect_exact(answer)
        self.ready()

    def sent(self) -> list[Any]:
        """The turns the partner got so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def last_user_message(self) -> str:
        return self.sent()[-1]["messages"][-1]["content"]

    def leave(self, keys: str = "\x04") -> None:
        """Leave, and see that the program ends well."""
        self.type(keys)
        self.child.expect_exact("LEFT")
        self.child.expect(pexpect.EOF)
        self.child.close()
        assert self.child.exitstatus == 0


@pytest.fixture
def terminal(tmp_path: Path):
    term = Terminal(tmp_path, "po", "ng")
    term.ready()
    yield term
    term.child.close(force=True)


def test_quotes() -> None:
    assert quotes_are_open('"""a') and quotes_are_open('"""') and quotes_are_open('  """a\nb')
    assert not quotes_are_open('"""a"""') and not quotes_are_open('a"""') and not quotes_are_open("")
    assert unquote('"""a\nb"""') == "a\nb"
    assert unquote('"""\na\n\nb\n"""') == "a\n\nb"
    assert unquote('say """ x') == 'say """ x'


def test_b32_one_line_is_one_message_and_the_answer_joins_the_conversation(terminal: Terminal) -> None:
    terminal.ask("ping")
    terminal.ask("again")
    assert [m["content"] for m in terminal.sent()[-1]["messages"]] == ["ping", "pong", "again"]
    terminal.leave()


def test_b32_triple_quotes_keep_newlines(terminal: Terminal) -> None:
    terminal.type('"""a\r')
    terminal.child.expect_exact("... ")
    terminal.ask('b"""')
    assert terminal.last_user_message() == "a\nb"
    terminal.leave()


def test_b32_open_triple_quotes_then_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.type('"""\r')
    terminal.child.expect_exact("... ")
    terminal.leave("\x04")
    assert terminal.sent() == []


def test_b32_a_paste_of_three_lines_is_one_message(terminal: Terminal) -> None:
    terminal.type("\x1b[200~one\rtwo\rthree\x1b[201~")
    terminal.ask("")
    assert len(terminal.sent()) == 1
    assert terminal.last_user_message() == "one\ntwo\nthree"
    terminal.leave()


def test_b32_ctrl_c_stops_the_answer_and_the_next_turn_is_sound(tmp_path: Path) -> None:
    term = Terminal(tmp_path, *["word "] * 3, *["more "] * 200)
    term.ready()
    term.type("count\r")
    term.child.expect_exact("more")
    term.type("\x03")
    term.ready()
    term.type("next\r")
    term.child.expect_exact("more")
    term.type("\x03")
    term.ready()
    messages = term.sent()[-1]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"].startswith("wordwordword") or messages[1]["content"].startswith("word word word")
    assert 3 < messages[1]["content"].count("o") < 203, "the answer was cut where it was interrupted"
    term.leave()


def test_b32_ctrl_c_at_the_prompt_drops_the_line(terminal: Terminal) -> None:
    terminal.type("half a line\x03")
    terminal.child.expect_exact("Ctrl-D or /bye leaves.")
    terminal.ready()
    terminal.ask("whole")
    assert [m["content"] for m in terminal.sent()[-1]["messages"]] == ["whole"]
    terminal.leave()


def test_b32_bye_leaves_and_an_unknown_command_is_not_sent(terminal: Terminal) -> None:
    terminal.type("/frobnicate now\r")
    terminal.child.expect_exact("/frobnicate is no command")
    terminal.child.expect_exact("/bye")
    terminal.ready()
    assert terminal.sent() == []
    terminal.leave("/bye\r")


def test_b32_a_line_of_100000_characters(terminal: Terminal) -> None:
    line = "x" * 100_000
    terminal.type("\x1b[200~" + line + "\x1b[201~")
    terminal.ask("")
    assert terminal.last_user_message() == line
    terminal.leave()


def test_b32_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    term = Terminal(tmp_path, "pong")
    term.ready()
    os.write(term.child.child_fd, b"a\xff\xfeb")
    term.ask("")
    message = term.last_user_message()
    assert message.startswith("a") and message.endswith("b") and message.encode("utf-8")
    term.leave()


def test_b32_output_into_a_pipe_has_no_escape_codes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    term = Terminal(
        tmp_path, program=f"{sys.executable} -m tests.cli.scripted_repl {tmp_path / 'log.jsonl'} pong | cat > {out}"
    )
    term.ready()  # the prompt is drawn on stderr
    term.type("ping\r")
    term.ready()
    term.type("\x04")
    term.child.expect(pexpect.EOF)
    assert out.read_text() == "pong\nLEFT\n"


def test_b32_a_terminal_that_cannot_draw_reads_plain_lines(tmp_path: Path) -> None:
    term = Terminal(tmp_path, "pong", term="dumb")
    term.child.expect_exact(">>> ")
    term.child.setecho(False)
    os.write(term.child.child_fd, b"a\xff\xc3\xa9\n")
    term.child.expect_exact("not UTF-8")
    term.child.expect_exact("pong\r\n>>> ")
    assert term.last_user_message() == "a\ufffd\xe9"
    term.type('"""a\n')
    term.child.expect_exact("... ")
    term.type('b"""\n')
    term.child.expect_exact("pong\r\n>>> ")
    assert term.last_user_message() == "a\nb"
    term.leave("\x04")
    assert "\x1b" not in term.child.before


def test_settings_reach_the_model(terminal: Terminal) -> None:
    terminal.type("/set temperature 0.25\r")
    terminal.ready()
    terminal.type("/set temperature hot\r")
    terminal.child.expect_exact("temperature must be a number, not 'hot'")
    terminal.type("/set top_p 7\r")
    terminal.child.expect_exact("top_p must lie between 0 and 1, not 7.0")
    terminal.type("/system Be brief.\r")
    terminal.ready()
    terminal.ask("ping")
    turn = terminal.sent()[-1]
    assert turn["sampling"] == {"temperature": 0.25}
    assert turn["messages"][0] == {"role": "system", "content": "Be brief."}
    terminal.leave()


def test_save_clear_load(terminal: Terminal) -> None:
    terminal.ask("ping")
    terminal.type("/save ../evil\r")
    terminal.child.expect_exact("a conversation's name has 1 to 64 letters")
    terminal.type("/save first\r")
    terminal.child.expect_exact("Saved 2 messages")
    terminal.type("/clear\r")
    terminal.child.expect_exact("The conversation is empty.")
    terminal.type("/load first\r")
    terminal.child.expect_exact("Loaded 2 messages.")
    terminal.ready()
    terminal.ask("again")
    assert [m["content"] for m in terminal.sent()[-1]["messages"]] == ["ping", "pong", "again"]
    assert [p.name for p in (terminal.home / "chats").iterdir()] == ["first.json"]
    terminal.leave()


def test_a_prompt_too_long_asks_before_dropping_turns(terminal: Terminal) -> None:
    terminal.ask("one")
    terminal.ask("two")
    terminal.type("three\r")
    terminal.child.expect_exact("Drop the oldest turns so that it fits?")
    terminal.type("y\r")
    terminal.child.expect_exact("pong")
    terminal.ready()
    assert [turn["truncate"] for turn in terminal.sent()] == [False, False, True]
    terminal.leave()


@pytest.mark.parametrize("key", ["\x03", "\x04"])
def test_no_answer_to_that_question_takes_the_message_back(terminal: Terminal, key: str) -> None:
    """Ctrl-C and Ctrl-D there end neither the program nor the conversation."""
    terminal.ask("one")
    terminal.ask("two")
    terminal.type("three\r")
    terminal.child.expect_exact("Drop the oldest turns so that it fits?")
    terminal.type(key)
    terminal.ready()
    terminal.type("/save kept\r")
    terminal.child.expect_exact("Saved 4 messages")
    terminal.ready()
    terminal.leave()


def test_history_is_kept_private_and_comes_back(tmp_path: Path) -> None:
    first = Terminal(tmp_path, "pong")
    first.ready()
    first.ask("remember me")
    first.leave()
    assert (first.home / "history").stat().st_mode & 0o077 == 0
    second = Terminal(tmp_path, "pong")
    second.ready()
    second.type("\x1b[A")  # up
    second.child.expect_exact("remember me")
    second.ask("")
    assert second.last_user_message() == "remember me"
    second.leave()
