"""Bounds on JSON that a grammar leaves open, so that a model that has lost its way still comes to an end.

A JSON grammar admits numbers of any length, blanks without end (inside strings), endless nesting and names. A small
model at a high temperature finds these ways. Past a bound, the tokens that would go on are masked, unless no other
token is left: a schema that asks for more gets more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["BoundTokens", "JSONPlace"]

MAX_BLANKS = 24
"""Blanks, line ends and tabs in a row (a newline and an indent of 20 fit)."""
MAX_DIGITS = 20
MAX_DIGITS_IN_STRING = 48
"""Digits in a row."""
MAX_EXPONENT = 3
MAX_DEPTH = 12
MAX_NAME = 64
"""Bytes in the name of an object's entry."""

_BLANK = b" \n\t\r"
_DIGITS = b"0123456789"


@dataclass(frozen=True)
class JSONPlace:
    """Where in a JSON text the reply stands."""

    stack: str = ""
    """Open brackets, `{` and `[`."""
    in_string: bool = False
    is_name: bool = False
    """The string is a name, or the next one will be."""
    escaped: bool = False
    length: int = 0
    """Bytes of the string so far."""
    digits: int = 0
    in_exponent: bool = False
    blanks: int = 0

    @property
    def most_digits(self) -> int:
        """How many digits in a row there may be here."""
        if self.in_string:
            return MAX_DIGITS_IN_STRING
        return MAX_EXPONENT if self.in_exponent else MAX_DIGITS

    def after(self, data: bytes) -> JSONPlace:
        """The place once `data` is written."""
        place = self
        for byte in data:
            place = place._after(byte)
        return place

    def _after(self, byte: int) -> JSONPlace:
        if self.in_string:
            return self._in_string(byte)
        letter = chr(byte)
        if byte in _BLANK:
            return replace(self, blanks=self.blanks + 1, digits=0, in_exponent=False)
        if byte in _DIGITS:
            return replace(self, digits=self.digits + 1, blanks=0)
        if letter in "eE+-." and (self.digits or self.in_exponent):
            return replace(self, digits=0, blanks=0, in_exponent=letter in "eE" or self.in_exponent)
        idle = replace(self, digits=0, blanks=0, in_exponent=False)
        if letter == '"':
            return replace(idle, in_string=True, length=0)
        if letter in "{[":
            return replace(idle, stack=self.stack + letter, is_name=letter == "{")
        if letter in "}]":
            return replace(idle, stack=self.stack[:-1], is_name=False)
        if letter == ",":
            return replace(idle, is_name=self.stack.endswith("{"))
        return replace(idle, is_name=False) if letter == ":" else idle

    def _in_string(self, byte: int) -> JSONPlace:
        digits = self.digits + 1 if byte in _DIGITS else 0
        grown = replace(self, length=self.length + 1, escaped=False, digits=digits)
        if self.escaped:
            return replace(grown, blanks=self.blanks + 1 if byte in b"nrt" else 0)
        if byte == ord("\\"):
            return replace(grown, escaped=True)
        if byte == ord('"'):
            return replace(self, in_string=False, blanks=0, digits=0)
        return replace(grown, blanks=self.blanks + 1 if byte in _BLANK else 0)


class BoundTokens:
    """The tokens of a vocabulary that go on where a bound forbids it. `piece(id)`: a token's bytes."""

    def __init__(self, vocab_size: int, piece: Callable[[int], bytes]):
        self._size = vocab_size
        self._piece = piece

    def limit(self, mask: npt.NDArray[np.bool_], place: JSONPlace) -> npt.NDArray[np.bool_]:
        """`mask` without the tokens that `place` has no room for, or `mask` if nothing else is left."""
        fewer = mask
        if place.blanks >= MAX_BLANKS:
            fewer = _without(fewer, self._blank)
        if place.digits >= place.most_digits:
            fewer = _without(fewer, self._digit)
        if len(place.stack) >= MAX_DEPTH:
            fewer = _without(fewer, self._opening_behind_quote if place.in_string else self._opening)
        if place.in_string and place.is_name and place.length >= MAX_NAME:
            fewer = _without(fewer, self._no_quote)
        return fewer

    def _where(self, test: Callable[[bytes], bool]) -> npt.NDArray[np.bool_]:
        import numpy as np

        return np.fromiter((test(self._piece(i)) for i in range(self._size)), np.bool_, self._size)

    @cached_property
    def _blank(self) -> npt.NDArray[np.bool_]:
        starts = (b" ", b"\n", b"\t", b"\r", b"\\n", b"\\t", b"\\r")
        return self._where(lambda data: data.startswith(starts) or data == b"\\")

    @cached_property
    def _digit(self) -> npt.NDArray[np.bool_]:
        return self._where(lambda data: data[:1].isdigit())

    @cached_property
    def _opening(self) -> npt.NDArray[np.bool_]:
        return self._where(lambda data: b"{" in data or b"[" in data)

    @cached_property
    def _opening_behind_quote(self) -> npt.NDArray[np.bool_]:
        return self._where(lambda data: any(mark in data.partition(b'"')[2] for mark in (b"{", b"[")))

    @cached_property
    def _no_quote(self) -> npt.NDArray[np.bool_]:
        return self._where(lambda data: not data.startswith(b'"'))


def _without(mask: npt.NDArray[np.bool_], refused: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    fewer = mask.copy()
    fewer[: len(refused)] &= ~refused[: len(mask)]
    return fewer if fewer.any() else mask
