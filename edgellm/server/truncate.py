"""Which turns of a chat that is too long are left out: whole ones, from the oldest, never the system's or the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["fit_turns"]

Turn = dict[str, Any]


def fit_turns(turns: Sequence[Turn], fits: Callable[[list[Turn]], bool]) -> list[Turn] | None:
    """The longest chat that `fits`, with all system messages and the last turn; None when those alone do not fit.

    A turn is a user message with everything up to the next one, so that a tool's result never loses its call.
    """
    groups = _groups(turns)
    if not fits(_without(turns, groups[:-1])):
        return None
    # Fewest groups to drop: `fits` gets true once enough are gone, so halve the range instead of counting up.
    low, high = 0, max(len(groups) - 1, 0)
    while low < high:
        middle = (low + high) // 2
        if fits(_without(turns, groups[:middle])):
            high = middle
        else:
            low = middle + 1
    return _without(turns, groups[:low])


def _groups(turns: Sequence[Turn]) -> list[list[int]]:
    """Positions of the non-system messages, one list per turn."""
    groups: list[list[int]] = []
    for position, turn in enumerate(turns):
        if turn["role"] == "system":
            continue
        if turn["role"] == "user" or not groups:
            groups.append([])
        groups[-1].append(position)
    return groups


def _without(turns: Sequence[Turn], dropped: Sequence[Sequence[int]]) -> list[Turn]:
    gone = {position for group in dropped for position in group}
    return [turn for position, turn in enumerate(turns) if position not in gone]
