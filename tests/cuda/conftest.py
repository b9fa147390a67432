"""The default suite must not touch CUDA, whichever of its tests ran."""

from __future__ import annotations

import os
import sys

import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a test imported numba's CUDA target without being asked to (NUMBA_ENABLE_CUDASIM)."""
    if not SIMULATED and "numba.cuda" in sys.modules:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nFAILED: a test imported numba.cuda; the default suite must not touch CUDA")
