"""Guesses made and accepted: in total, by position in the run, and per verification."""

from __future__ import annotations

from typing import Any

__all__ = ["Tally"]


class Tally:
    """Counts verifications."""

    def __init__(self) -> None:
        self.drafted_at: list[int] = []
        self.accepted_at: list[int] = []
        """How often the guess at each position of a run was made, and accepted."""
        self.verifications = self.rejected = 0
        """Runs of guesses verified, and those among them with a wrong one."""

    @property
    def drafted(self) -> int:
        """Guesses verified."""
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        """Guesses that were right, as were all before them."""
        return sum(self.accepted_at)

    def count(self, drafted: int, accepted: int) -> None:
        """One verification of `drafted` guesses, the first `accepted` of which were right."""
        if not drafted:
            return
        self.verifications += 1
        self.rejected += accepted < drafted
        for counts, n in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
            counts += [0] * (drafted - len(counts))
            for position in range(n):
                counts[position] += 1

    def report(self) -> dict[str, Any]:
        """Totals, the share accepted (None without guesses) at each position and in all, the mean per verification."""
        drafted, accepted = self.drafted, self.accepted
        return {
            "drafted": drafted,
            "accepted": accepted,
            "acceptance": accepted / drafted if drafted else None,
            "by_position": [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True)],
            "verifications": self.verifications,
            "rejected": self.rejected,
            "mean_accepted": accepted / self.verifications if self.verifications else 0.0,
        }
