"""Which way to multiply, measured on the user's own chip and remembered: one row, few rows and prompts may differ.

Candidates: "kernel" (blocks read as they lie; for prompts: dequantised to half, then MLX's matmul) and "affine" (the
weight repacked to MLX's format, `affine.py`). The first load of a shape times both; the answer goes to
`<home>/metal/<chip>.json` and later loads read it. A damaged file is measured anew."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["CANDIDATES", "Choices"]

log = logging.getLogger(__name__)

CANDIDATES = ("kernel", "affine")
REPEATS = 7
MARGIN = 0.95
"""A repacked copy must take less than this share of the kernel's time: it costs memory and load time."""


class Choices:
    """Winners by (type, rows of the weight, row length), for one chip."""

    def __init__(self, chip: str, folder: Path):
        name = re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-") or "unknown"
        self.path = folder / f"{name}.json"
        self._winners = _read(self.path)

    def winner(self, kind: str, n: int, k: int, measure: Callable[[str], float]) -> str:
        """The candidate for weights of n rows of k. `measure(candidate)` gives the seconds of one product, or raises
        where the device cannot run it; called only when the shape is new."""
        key = f"{kind} {n}x{k}"
        held = self._winners.get(key)
        if held in CANDIDATES:
            return str(held)
        times = {candidate: self._time(candidate, measure) for candidate in CANDIDATES}
        best = "affine" if times["affine"] < MARGIN * times["kernel"] else "kernel"
        log.info("%s: %s (%s)", key, best, ", ".join(f"{c} {t * 1e6:.0f} us" for c, t in times.items()))
        self._winners[key] = best
        self._write()
        return best

    @staticmethod
    def _time(candidate: str, measure: Callable[[str], float]) -> float:
        try:
            return min(measure(candidate) for _ in range(REPEATS))
        except Exception as error:
            log.warning("the %s product does not run on this device: %s", candidate, error)
            return float("inf")

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{time.time_ns()}.tmp")
        part.write_text(json.dumps(self._winners, indent=1, sort_keys=True))
        part.replace(self.path)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
