"""Every kernel under AddressSanitizer and UBSan, in a process that starts with them.

Building all of them with both takes minutes: `pytest -m slow tests/metal/test_sanitizers.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")
from tests.metal.can_run import cannot_run

if reason := cannot_run():
    pytest.skip(reason, allow_module_level=True)

from tests.metal.harness import sanitizer_environment

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[2]


def sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.metal.sanitized", *arguments]
    return subprocess.run(command, cwd=ROOT, env=sanitizer_environment(), capture_output=True, text=True)


@pytest.mark.parametrize(
    ("kinds", "count"),
    [pytest.param([], 15 + 3, marks=pytest.mark.slow), (["Q4_K", "Q6_K", "MXFP4"], 3 + 3)],
    ids=["all", "three"],
)
def test_no_finding_under_the_address_sanitizer(kinds: list[str], count: int) -> None:
    run = sanitized(*kinds)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("ok") == count


def test_the_sanitizer_sees_a_read_past_the_end() -> None:
    run = sanitized("--planted")
    assert run.returncode != 0
    assert "heap-buffer-overflow" in run.stderr
