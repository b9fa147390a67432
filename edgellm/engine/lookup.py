"""Prompt lookup: guess that what followed the last few tokens earlier in the same text follows again."""

from __future__ import annotations

from edgellm.engine.request import Request

__all__ = ["PromptLookup"]

LONG, SHORT = 4, 2
"""Lengths of the n-grams that are looked up; the longer match wins."""


class PromptLookup:
    """An index of n-grams per request, grown as its tokens come. No model, so a guess costs nothing to make."""

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def propose(self, request: Request, depth: int) -> tuple[list[int], int]:
        """Up to `depth` tokens that may follow, or none, and the length of the n-gram that speaks for them."""
        index = self._indexes.setdefault(request.request_id, _Index())
        return index.guess(request.token_ids, depth)

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._indexes.pop(request_id, None)


class _Index:
    """Where each n-gram was last followed by something."""

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], int] = {}
        self._seen = 0

    def guess(self, tokens: list[int], depth: int) -> tuple[list[int], int]:
        for end in range(max(self._seen, SHORT), len(tokens)):
            for n in (SHORT, LONG):
                if end >= n:
                    self._follows[tuple(tokens[end - n : end])] = end
        self._seen = len(tokens)
        for n in (LONG, SHORT):
            start = self._follows.get(tuple(tokens[-n:])) if len(tokens) >= n else None
            if start is not None:
                found = tokens[start : start + depth]
                # A match that runs into the end of the text repeats: its period is what lies between.
                while len(found) < depth:
                    found += tokens[start : start + depth - len(found)]
                return found, n
        return [], 0
