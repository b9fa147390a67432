"""mypy --strict over the whole package: `python -m tests.typecheck`.

`backends/` and `models/` are imported as `edgellm.backends` and `edgellm.models`, which type checkers cannot see from
the install. So a git-ignored tree of links, `.typing/edgellm/`, shows mypy the layout that Python sees, and the number
of files that mypy checked must be the number of files there are.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREE = ROOT / ".typing"


def build_tree() -> int:
    """Make `.typing/edgellm` anew; the number of Python files in it."""
    shutil.rmtree(TREE, ignore_errors=True)
    package = TREE / "edgellm"
    package.mkdir(parents=True)
    for source in (ROOT / "edgellm").iterdir():
        if source.name != "__pycache__":
            (package / source.name).symlink_to(source)
    for name in ("backends", "models"):
        (package / name).symlink_to(ROOT / name)
    folders = ("edgellm", "backends", "models")
    return sum(1 for folder in folders for _ in (ROOT / folder).rglob("*.py"))


def run() -> int:
    """Type check; the exit code."""
    n_files = build_tree()
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "edgellm"]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    if done.returncode:
        return done.returncode
    seen = re.search(r"no issues found in (\d+) source files?", done.stdout)
    if not seen or int(seen[1]) != n_files:
        print(f"mypy must see {n_files} files; it says: {done.stdout.strip()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
