"""What an Apple GPU may hold: limits from the device's own figures, so that a model never pushes a Mac into swap.

macOS recommends a working set of two thirds to three quarters of the unified memory. Budgets are capped by it
(`edgellm.backends.memory_limit`), and MLX is told the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

__all__ = ["Limits", "apply_limits", "device_info", "limits_of"]

log = logging.getLogger(__name__)

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Bytes; 0: the device does not say."""

    wired: int
    """What MLX may keep resident, and so what models may take together."""
    cache: int
    """Freed buffers MLX may hold back for reuse."""
    buffer: int
    """One allocation, so one tensor."""


def device_info() -> Mapping[str, Any]:
    """What MLX says about the GPU; empty without one."""
    info: Mapping[str, Any] = mx.device_info() if mx.metal.is_available() else {}
    return info


def limits_of(info: Mapping[str, Any]) -> Limits:
    """Limits of a device as `mx.device_info()` describes it. One that gives no figure keeps MLX's own defaults."""
    memory = int(info.get("memory_size", 0))
    working_set = int(info.get("max_recommended_working_set_size", 0)) or memory * 3 // 4
    # A step's buffers are the same every time: a small cache serves them, a large one would only hide memory use.
    cache = min(2 * GIB, max(256 * MIB, memory // 32)) if memory else 0
    return Limits(wired=working_set, cache=cache, buffer=int(info.get("max_buffer_length", 0)))


def apply_limits(limits: Limits) -> None:
    """Set MLX's limits for this process."""
    if limits.wired:
        try:
            mx.set_wired_limit(limits.wired)
        except (
            RuntimeError,
            ValueError,
        ) as error:  # all runs without it, perhaps slower
            log.warning("MLX does not take %d bytes as its wired limit: %s", limits.wired, error)
    if limits.cache:
        mx.set_cache_limit(limits.cache)
