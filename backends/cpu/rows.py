"""Numbers that follow the rows of a step, so that one recording serves every step up to its size.

A tape is recorded for the most rows it is kept for. Shapes made there are plain ints, apart from the lengths that count
rows: those are `Rows`, ints that remember how they came about. Where one becomes a number of units or an argument of
an op, the tape writes its value for the rows at hand before each run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["OUTPUTS", "TOKENS", "Growing", "Rows", "pieces", "room"]

TOKENS, OUTPUTS = 0, 1
"""What is counted: rows of the step, rows whose result is wanted."""


class Rows(int):
    """ceil(count * per / each), as an int its value for the recorded count. Products with plain ints, and quotients
    that are even for every count, are Rows; whatever else is made from one is the plain int for the recorded count."""

    what: int
    per: int
    each: int

    def __new__(cls, value: int, what: int, per: int = 1, each: int = 1) -> Rows:
        made = int.__new__(cls, value)
        made.what, made.per, made.each = what, per, each
        return made

    def __mul__(self, other: Any) -> int:
        if type(other) is int and self.each == 1:
            return Rows(int.__mul__(self, other), self.what, self.per * other)
        return int.__mul__(self, other)

    __rmul__ = __mul__

    def of(self, counts: Sequence[int]) -> int:
        """Its value for these counts (of TOKENS, of OUTPUTS)."""
        return -(-counts[self.what] * self.per // self.each)

    def __floordiv__(self, other: Any) -> int:
        if type(other) is int and self.each == 1 and self.per % other == 0:
            return Rows(int(self) // other, self.what, self.per // other)
        return int.__floordiv__(self, other)


def pieces(size: int, length: int) -> int:
    """How many pieces of a length hold `size` things."""
    n = -(-int(size) // length)
    return Rows(n, size.what, size.per, length) if isinstance(size, Rows) and size.each == 1 else n


def room(n: int, least: int) -> int:
    """`least` or four, sixteen ... times it: the next that holds n."""
    while least < n:
        least *= 4
    return least


class Growing:
    """Places in an int64 array (flat) whose values follow the rows."""

    def __init__(self, target: npt.NDArray[np.int64], places: Iterable[tuple[int, int]]):
        rows = [(place, value) for place, value in places if type(value) is Rows]
        self._target = target
        self._places = np.array([place for place, _ in rows], np.int64)
        self._what, self._per, self._each = np.array(
            [(v.what, v.per, v.each) for _, v in rows], np.int64
        ).reshape(-1, 3).T  # fmt: skip

    def set(self, counts: npt.NDArray[np.int64]) -> None:
        """Write all values for these counts (of TOKENS, of OUTPUTS)."""
        self._target[self._places] = -(-counts[self._what] * self._per // self._each)
