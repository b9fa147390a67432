"""Finding special tokens in text: leftmost, then longest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["TokenMatcher"]

_END = ""


class TokenMatcher:
    """A trie over token texts. Time is linear in the text for texts that share no long prefixes with tokens; a run of
    the same character (blanks, newlines: the usual tokens of that kind) is linear too, as each match consumes it."""

    def __init__(self, tokens: Mapping[str, int]):
        self._trie: dict[str, Any] = {}
        for text, token in tokens.items():
            node: dict[str, Any] = self._trie
            for letter in text:
                node = node.setdefault(letter, {})
            node[_END] = token
        first = "".join(re.escape(letter) for letter in self._trie if letter != _END)
        self._first = re.compile(f"[{first}]") if first else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yields stretches of text and the ids between them, in order."""
        begin = position = 0
        while self._first is not None and (found := self._first.search(text, position)):
            token, end = self._longest(text, found.start())
            if token is None:
                position = found.start() + 1
                continue
            if begin < found.start():
                yield text[begin : found.start()]
            yield token
            begin = position = end
        if begin < len(text):
            yield text[begin:]

    def starts(self, text: str) -> Iterator[int]:
        """Where tokens begin, those inside or across others included."""
        position = 0
        while self._first is not None and (found := self._first.search(text, position)):
            position = found.start() + 1
            if self._longest(text, found.start())[0] is not None:
                yield found.start()

    def unfinished(self, text: str) -> Iterator[int]:
        """Where a token begins that the end of `text` cuts off."""
        for start in range(len(text)):
            node = self._trie
            for letter in text[start:]:
                node = node.get(letter, {})
            if any(letter != _END for letter in node):
                yield start

    def _longest(self, text: str, start: int) -> tuple[int | None, int]:
        node, token, end = self._trie, None, start
        for i in range(start, len(text)):
            if text[i] not in node:
                break
            node = node[text[i]]
            if _END in node:
                token, end = node[_END], i + 1
        return token, end
