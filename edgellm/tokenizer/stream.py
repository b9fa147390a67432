"""Ids to text, one at a time, never cutting a character in two."""

from __future__ import annotations

import codecs
from collections.abc import Callable

__all__ = ["StreamDecoder"]


class StreamDecoder:
    """Collects the bytes of tokens and hands out text as soon as whole characters are there.

    `piece(id)` gives a token's bytes (empty for hidden ones). Bytes that are no UTF-8 become one U+FFFD per run, as
    `bytes.decode(errors="replace")` has it, so joined pieces equal the text decoded at once.
    """

    def __init__(self, piece: Callable[[int], bytes], strip_first_space: bool):
        self._piece = piece
        self._strip = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became complete with `token`, often one token's own, sometimes ''."""
        data = self._piece(token)
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end: '' or, for a character that was cut, one U+FFFD."""
        return self._decoder.decode(b"", final=True)
