"""Speculators that tests steer: guesses by rule, and a draft model that is always asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from edgellm.engine.answer import Answer
from edgellm.engine.depth import Prospect
from edgellm.engine.speculate import Speculator

__all__ = ["KINDS", "Forced", "always_guess"]

KINDS = ("right", "wrong", "alternating", "random")


class Forced:
    """In the speculator's place: guesses by rule. `kind`: one of KINDS. `right(answer, depth)`: the tokens that the
    target is going to choose."""

    def __init__(self, kind: str, right: Callable[[Answer, int], list[int]], vocab: int, depth: int = 7):
        self.kind, self.right, self.vocab, self.depth = kind, right, vocab, depth
        self.rng = random.Random(0)
        self.drafted = 0

    def propose(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            request = answer.request
            room = max(0, min(self.depth, request.max_tokens - request.num_new_tokens - 1))
            guesses = self.right(answer, room)
            for i, right in enumerate(guesses):
                wrong = right % (self.vocab - 1) + 1
                if self.kind == "wrong" or (self.kind == "alternating" and i % 2):
                    guesses[i] = wrong
                elif self.kind == "random":
                    guesses[i] = self.rng.randrange(1, self.vocab)
            request.draft_ids = guesses
            self.drafted += len(guesses)

    def observe(self, results: Any, seconds: float) -> None: ...
    def finished(self, answer: Answer) -> None: ...
    def close(self) -> None: ...
    def snapshot(self) -> dict[str, Any]:
        return {}


def always_guess(speculator: Speculator) -> None:
    """A clock is no test: guess as far as possible in every step, whatever it takes."""
    controller = speculator.controller
    for seqs in range(1, 9):
        controller.times.set(seqs, seqs, 1.0)

    def choose(prospects: Sequence[Prospect], context: int = 0) -> list[int]:
        return [min(prospect.limit, controller.most) for prospect in prospects]

    controller.choose = choose  # type: ignore[method-assign]
    controller.pays = lambda *args: True  # type: ignore[method-assign]
