"""The REPL over a scripted session, as a program for the pty tests: `python -m tests.cli.scripted_repl LOG [PIECE...]`.

Each turn answers with the PIECEs, 50 ms apart, and appends the messages it was sent to LOG as one JSON line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgellm.cli.prompt import make_reader
from edgellm.cli.repl import Conversation, Repl
from edgellm.cli.session import Answer, Message
from edgellm.config import home
from edgellm.errors import ContextLengthError


class ScriptedReply:
    def __init__(self, pieces: list[str]):
        self._pieces = pieces
        self._sent: list[str] = []
        self.answer = Answer("", "abort")

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            time.sleep(0.05)
            self._sent.append(piece)
            yield piece
        self.answer = Answer("".join(self._sent), "stop", new_tokens=len(self._sent), ttft_s=0.05, tpot_s=0.05)

    def cancel(self) -> None:
        self.answer = Answer("".join(self._sent), "abort")


class ScriptedSession:
    """Holds at most 4 messages of conversation: more is ContextLengthError unless `truncate`."""

    name = "scripted"
    load_s = 0.0
    system = None
    defaults: dict[str, Any] = {}  # noqa: RUF012
    opening: list[Message] = []  # noqa: RUF012

    def __init__(self, log: Path, pieces: list[str]):
        self._log, self._pieces = log, pieces

    def reply(self, messages: list[Message], sampling: dict[str, Any], truncate: bool = False) -> ScriptedReply:
        if len(messages) > 4 and not truncate:
            raise ContextLengthError(len(messages), 4)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"messages": messages, "sampling": sampling, "truncate": truncate}) + "\n")
        return ScriptedReply(self._pieces)

    def continue_text(self, prompt: str, sampling: dict[str, Any]) -> ScriptedReply:
        raise NotImplementedError

    def facts(self) -> dict[str, str]:
        return {"architecture": "scripted"}

    def close(self) -> None:
        pass


if __name__ == "__main__":
    session = ScriptedSession(Path(sys.argv[1]), sys.argv[2:])
    Repl(session, make_reader(home() / "history"), Conversation()).loop()
    print("LEFT")
