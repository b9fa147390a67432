"""What reaches the terminal: Markdown in whole blocks, control characters made visible, sizes read and written."""

from __future__ import annotations

import random
import signal
from typing import Any

import click
import pytest

from edgellm.cli.options import Size
from edgellm.cli.render import MarkdownPrinter, split_block, terminal_text
from edgellm.cli.show import size_text


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("one\ntwo", ""),
        ("one\n\ntwo", "one\n\n"),
        ("```py\na\n\nb\n", ""),
        ("```py\na\n\nb\n```\nrest", "```py\na\n\nb\n```\n"),
        ("```\na\n``` b\n\n", ""),
        ("~~~\n```\n~~~\nx", "~~~\n```\n~~~\n"),
        ("\n", "\n"),
    ],
)
def test_blocks(text: str, block: str) -> None:
    assert split_block(text) == (block, text.removeprefix(block))


def test_blocks_in_pieces_are_the_whole_text() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    text = "".join(rng.choice(["a", "b", "\n", "\n\n", "```\n", " "]) for _ in range(400))
    done, rest, position = "", "", 0
    while position < len(text):
        size = rng.randint(1, 7)
        rest += text[position : position + size]
        position += size
        block, rest = split_block(rest)
        while block:
            done += block
            block, rest = split_block(rest)
    assert done + rest == text


def test_control_characters_are_made_visible() -> None:
    assert terminal_text("a\x1b[2Jb\tc\n\x07\x9bd\x7f") == "a␛[2Jb\tc\n␇\ufffdd␡"
    assert terminal_text("é日🦙") == "é日🦙"


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("4096", 4096), ("8G", 8 << 30), ("1.5GiB", 3 << 29), ("800m", 800 << 20), ("2TB", 2 << 40)]
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert Size().convert(text, None, None) == n_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "1e9", "8 apples", "9" * 30])
def test_what_is_no_size_is_wrong_usage(text: str) -> None:
    with pytest.raises(click.UsageError):
        Size().convert(text, None, None)


def test_size_text() -> None:
    assert [size_text(n) for n in (0, 999, 98_362_432, 40_000_000_000)] == ["0 B", "999 B", "98.4 MB", "40.00 GB"]


def test_ctrl_c_half_way_through_a_drawing_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else rich's display counts as started but is not, and closing it ends the chat with an IndexError."""
    from rich.console import Console

    started = Console.set_live

    def interrupted(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return started(*args)

    monkeypatch.setattr(Console, "set_live", interrupted)
    before = signal.getsignal(signal.SIGINT)
    printer = MarkdownPrinter()
    with pytest.raises(KeyboardInterrupt):
        printer.write("Hello")
    printer.close()
    assert signal.getsignal(signal.SIGINT) is before
