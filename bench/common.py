"""What the engine's benchmarks share: prompts without a common block, and one JSON line that says where it ran."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["random_prompts", "report", "resident_mb"]


def random_prompts(n: int, length: int, seed: int = 0, vocab: int = 30000) -> list[list[int]]:
    """Ids that share no block with each other."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, vocab) for _ in range(length)] for _ in range(n)]


def report(bench: str, **values: Any) -> None:
    """One JSON line on stdout."""
    run = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(run, capture_output=True, text=True, check=False).stdout.strip()
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"bench": bench, "commit": commit, "machine": machine, **values}), flush=True)


def resident_mb(kind: str = "RssAnon") -> float:
    """This process's resident memory in MB (Linux): "RssAnon" without mapped files, "VmRSS" with them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {kind} on this system")
