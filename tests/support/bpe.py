"""A byte-level BPE vocabulary small enough for tiny models: 256 bytes and 15 merges."""

from __future__ import annotations

__all__ = ["MERGES", "byte_tokens"]

MERGES = ["t h", "Ġ t", "Ġt h", "i n", "Ġ a", "e r", "o n", "r e", "Ġth e", "a t", "h e", "l l", "o u", "in g", "Ġ w"]


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in byte order."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in kept)
    stand_in = {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [stand_in[b] for b in range(256)]
