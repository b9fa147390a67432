"""gpt-oss replies: channels in place of tags.

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"x": 1}<|call|>

Commentary without a recipient is a preamble for the user: content.
"""

from __future__ import annotations

import json
import re

from edgellm.chat.call_bodies import Tools
from edgellm.chat.reply import Piece, find_tag

__all__ = ["HARMONY_MARKS", "HarmonyParser"]

HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_HEADER_END = "<|message|>"
_BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


class HarmonyParser:
    """`prompt_tail`: how the prompt ends, which may already open a channel. Without `tools` calls are content."""

    def __init__(self, tools: Tools = (), prompt_tail: str = ""):
        self._tools = bool(tools)
        opened = prompt_tail.rpartition("<|start|>")[2]
        self._header = "" if "<|message|>" not in opened else opened.split("<|message|>")[0]
        self._in_body = "<|message|>" in opened
        self._buffer = "" if self._in_body else opened.removeprefix("assistant")
        self._raw = ""
        self.cut = False

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._buffer += text
        out: list[Piece] = []
        while self._step(out):
            pass
        return out

    def finish(self) -> list[Piece]:
        """What was held back: a call whose end token ended the reply, a cut one as content."""
        out = self.push("")
        if self._in_body:
            self._body_piece(self._buffer, out, ended=True, last=True)
            self.cut = self.cut or self._is_thought()
        else:
            self.cut = bool(self._buffer.strip())
        self._buffer = ""
        return out

    def _step(self, out: list[Piece]) -> bool:
        if not self._in_body:
            return self._read_header(out)
        at, tag = find_tag(self._buffer, _BODY_ENDS)
        if not tag and self._recipient():
            return False
        self._body_piece(self._buffer[:at], out, ended=bool(tag))
        self._buffer = self._buffer[at:]
        if tag:
            self._in_body = False
            self._buffer = self._buffer[len(tag) :] if tag not in ("<|start|>", "<|channel|>") else self._buffer
        return bool(tag)

    def _read_header(self, out: list[Piece]) -> bool:
        """Everything up to <|message|>; text without any mark is plain content of a model that forgot its format."""
        at, tag = find_tag(self._buffer, (_HEADER_END,))
        if tag:
            self._header = self._buffer[:at]
            self._buffer = self._buffer[at + len(tag) :]
            self._in_body, self._raw = True, self._header + tag
            return True
        text = self._buffer.lstrip()
        if text and not any(mark.startswith(text) or text.startswith(mark) for mark in (*HARMONY_MARKS, "assistant")):
            out.append(Piece(content=self._buffer))
            self._buffer = ""
        return False

    def _recipient(self) -> str | None:
        found = re.search(r"to=(?:functions\.)?([\w.\-]+)", self._header)
        return found.group(1) if found and self._tools else None

    def _is_thought(self) -> bool:
        return "<|channel|>analysis" in self._header and self._recipient() is None

    def _body_piece(self, text: str, out: list[Piece], ended: bool, last: bool = False) -> None:
        name = self._recipient()
        if name is not None and ended:
            try:
                arguments = json.loads(text, strict=False) if text.strip() else {}
            except (ValueError, RecursionError):
                arguments = None
            if isinstance(arguments, dict):
                out.append(Piece(calls=((name, arguments),)))
                return
            self.cut = self.cut or last
            text = self._raw + text
        if text:
            out.append(Piece(thinking=text) if self._is_thought() else Piece(content=text))
