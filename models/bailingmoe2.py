"""Ling 2 and Ring 2: what dots.llm1 computes, with q, k and v in one tensor, part of each head rotating (halves), and
experts in groups."""

from __future__ import annotations

from edgellm.models.dots1 import Dots1

__all__ = ["BailingMoE2"]


class BailingMoE2(Dots1):
    """Arch `bailingmoe2`."""
