"""What was measured and checked on the user's own chip, and is remembered.

Weights: "kernel" (blocks read as they lie; for prompts: dequantised to half, then MLX's matmul) or "affine" (repacked
to MLX's format, `affine.py`). Norms before products: "norm apart" or "norm inside" the product's kernel. The first use
of a shape times both; the answer goes to `<home>/metal/<chip>.json` and later runs read it. So do verdicts on kernels:
the first use of a type compares its kernels with plain ops. A damaged file is measured anew."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgellm import __version__

__all__ = ["Choices"]

log = logging.getLogger(__name__)

REPEATS = 7
MARGIN = 0.95
"""The second candidate must take less than this share of the first one's time: the first costs less memory, or is the
simpler one."""


class Choices:
    """Winners by a key that names type and shape, for one chip."""

    def __init__(self, chip: str, folder: Path):
        name = re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-") or "unknown"
        self.path = folder / f"{name}.json"
        self._winners = _read(self.path)

    def winner(self, key: str, candidates: Sequence[str], measure: Callable[[str], float]) -> str:
        """One of two candidates. `measure(candidate)` gives the seconds of one run, or raises where the device cannot
        run it; called only when the key is new."""
        held = self._winners.get(key)
        if held in candidates:
            return str(held)
        times = {candidate: self._time(candidate, measure) for candidate in candidates}
        first, second = candidates
        best = second if times[second] < MARGIN * times[first] else first
        log.info("%s: %s (%s)", key, best, ", ".join(f"{c} {t * 1e6:.0f} us" for c, t in times.items()))
        self._winners[key] = best
        self._write()
        return best

    def passed(self, key: str, check: Callable[[], bool]) -> bool:
        """Whether a check passed, run once on this chip with this version of edgellm."""
        key = f"{key}, edgellm {__version__}"
        if self._winners.get(key) not in ("ok", "wrong"):
            self._winners[key] = "ok" if check() else "wrong"
            self._write()
        return bool(self._winners[key] == "ok")

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
