"""Keeps text of messages and tools from spelling control tokens, without changing it.

Where such text holds a marker (or, at its ends, a piece of one that neighbouring text could complete), one character
of it is replaced by a private-use character before the template runs. That survives whatever a template does to text
(strip, split, slice, length, comparisons, JSON), cannot match a marker, and is turned back once the markers of the
template itself have been found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from edgellm.tokenizer.special import TokenMatcher

__all__ = ["KNOWN_ROLES", "Guard", "Markers"]

# Roles take part in building markers (`<|user|>`), so these and those the template names are left as they are.
KNOWN_ROLES = frozenset(
    ("system", "user", "assistant", "tool", "developer", "function", "model", "ipython", "observation", "environment")
)
_PRIVATE = range(0xF0000, 0xFFFFE)


class Markers:
    """The control tokens of a vocabulary, to be looked for forwards and backwards."""

    def __init__(self, texts: Iterable[str]):
        texts = list(texts)
        self._forward = TokenMatcher(dict.fromkeys(texts, 0))
        self._backward = TokenMatcher({text[::-1]: 0 for text in texts})
        self._longest = max(map(len, texts), default=0)

    def risky(self, text: str) -> Iterator[int]:
        """Positions to hide so that neither `text` alone nor its ends with a neighbour can make a marker."""
        yield from self._forward.starts(text)
        for part, offset in ((text, 0), (text.strip(), len(text) - len(text.lstrip()))):
            tail = max(0, len(part) - self._longest)
            yield from (offset + tail + i for i in self._forward.unfinished(part[tail:]))
            head = part[: self._longest]
            yield from (offset + len(head) - 1 - i for i in self._backward.unfinished(head[::-1]))


class Guard:
    """The hiding for one rendering. `texts` are all texts that go into it: hidden characters are none of theirs."""

    def __init__(self, markers: Markers, texts: Iterable[str], roles: frozenset[str]):
        self._markers = markers
        self._roles = roles
        used = {letter for text in texts for letter in text if ord(letter) >= _PRIVATE.start}
        self._free = (chr(c) for c in _PRIVATE if chr(c) not in used)
        self._hidden: dict[str, str] = {}
        self._back: dict[int, str] = {}

    def hide(self, value: Any) -> Any:
        """A copy of a message, a tool or any JSON value with its texts guarded (keys too)."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, dict):
            return type(value)((self._hide_text(str(k)), self._hide_entry(k, v)) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return [self.hide(v) for v in value]
        return value

    def restore(self, text: str) -> str:
        """The text as it was given."""
        return text.translate(self._back) if self._back else text

    def dump_ascii(self, text: str) -> str:
        """JSON `text` with everything outside ASCII escaped; hidden characters count as what they stand for."""

        def escape(found: re.Match[str]) -> str:
            letter = self._back.get(ord(found.group(0)), found.group(0))
            return found.group(0) if letter.isascii() else json.dumps(letter)[1:-1]

        return re.sub(r"[^\x00-\x7f]", escape, text)

    def _hide_entry(self, key: Any, value: Any) -> Any:
        if key != "role" or not isinstance(value, str):
            return self.hide(value)
        return value if value in self._roles else "".join(map(self._hidden_letter, value))

    def _hide_text(self, text: str) -> str:
        positions = set(self._markers.risky(text))
        if not positions:
            return text
        letters = list(text)
        for i in positions:
            letters[i] = self._hidden_letter(letters[i])
        return "".join(letters)

    def _hidden_letter(self, letter: str) -> str:
        if letter not in self._hidden:
            self._hidden[letter] = next(self._free)
            self._back[ord(self._hidden[letter])] = letter
        return self._hidden[letter]
