"""What an Apple GPU may hold: limits from the device's own figures, so that a model never pushes a Mac into swap.

macOS recommends a working set of about three quarters of the unified memory; `edgellm.memory.default_budget` keeps
weights, cache and scratch below that, and this module tells MLX the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

__all__ = ["Limits", "apply_limits", "limits_of"]

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Bytes. `wired`: what MLX may keep resident; `cache`: freed buffers it may hold back for reuse."""

    wired: int
    cache: int


def limits_of(info: Mapping[str, Any]) -> Limits:
    """Limits for a device as `mx.device_info()` describes it (`memory_size`, `max_recommended_working_set_size`).

    A device that names neither figure gets limits of 0: MLX's own defaults stay."""
    memory = int(info.get("memory_size", 0))
    working_set = int(info.get("max_recommended_working_set_size", 0)) or memory * 3 // 4
    # A step's buffers are the same every time: a small cache serves them, a large one would only hide memory use.
    return Limits(wired=working_set, cache=min(2 * GIB, max(256 * MIB, memory // 32)) if memory else 0)


def apply_limits(info: Mapping[str, Any]) -> Limits:
    """Set MLX's limits for this process; returns what was set."""
    limits = limits_of(info)
    if limits.wired:
        mx.set_wired_limit(limits.wired)
    if limits.cache:
        mx.set_cache_limit(limits.cache)
    return limits
