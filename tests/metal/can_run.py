"""Where the shim can run Metal text."""

from __future__ import annotations

import platform
import shutil
import sys

__all__ = ["cannot_run"]


def cannot_run() -> str:
    """Why the Metal text cannot run on this CPU; empty where it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the Metal text runs on Linux, x86-64 only: lanes switch in its assembly and load through ELF"
    return "" if shutil.which("g++") else "g++ is not installed: the Metal text cannot be run on this CPU"
