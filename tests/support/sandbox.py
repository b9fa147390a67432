"""Runs a file through `open_gguf` in a process of its own, with 512 MB of address space and 5 seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_CHILD = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
from edgellm.errors import EdgeLLMError
from edgellm.loader import open_gguf
results = []
for path in sys.argv[1:]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with open_gguf(path) as file:
            kind, message = "loaded", "%d tensors" % len(file.tensors)
    except EdgeLLMError as error:
        kind, message = type(error).__name__, str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    results.append({"kind": kind, "message": message, "grown": grown * (1 if sys.platform == "darwin" else 1024)})
print(json.dumps(results))
"""


def open_in_sandbox(*paths: Path) -> list[dict[str, Any]]:
    """For each path: `kind` ("loaded" or the error's class), `message`, `grown` (bytes of peak memory). A crash, a
    hang or an untyped exception fails the test."""
    limits = {"OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", _CHILD, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 + len(paths), env=limits)
    assert done.returncode == 0, done.stderr[-2000:]
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results
