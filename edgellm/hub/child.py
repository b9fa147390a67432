"""Python programs beside this one."""

from __future__ import annotations

import sys

__all__ = ["python_command"]


def python_command(code: str) -> list[str]:
    """The command line that runs `code` in a Python of its own. It finds modules where this one does, but not in the
    user's folder, whose files are none of ours (and where a `dis.py` would take the place of Python's own)."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = filter(None, sys.path); {code}"]
