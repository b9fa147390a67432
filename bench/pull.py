"""Pull of a 2 GB file from a loopback origin (sendfile) against `curl | tee FILE | sha256sum`, alternating.

    python bench/pull.py [--gb 2] [--runs 3] [--dir FOLDER]

Prints one JSON line: seconds of each run, and the ratio of the medians (1.0: as fast; above: faster).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVE = """
import sys, time
from pathlib import Path
from tests.support.hubs import serve_registry
from tests.support.origin import Origin
origin = Origin()
serve_registry(origin, "library/m", [("application/vnd.ollama.image.model", Path(sys.argv[1]))])
print(origin.port, next(iter(origin.files)), flush=True)
time.sleep(3600)
"""
PULL = """
import sys
from pathlib import Path
from edgellm.hub.pull import PullOptions, pull
from edgellm.hub.store import Store
pull(f"http://127.0.0.1:{sys.argv[1]}/library/m", Store(Path(sys.argv[2])), PullOptions(insecure=True))
"""


def timed(command: list[str]) -> float:
    """Wall seconds of a command that must succeed."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        file = folder / "model.bin"
        with open(file, "wb") as out:
            for _ in range(int(options.gb * 1e9) // 1_000_000):
                out.write(os.urandom(1_000_000))
        server = subprocess.Popen([sys.executable, "-c", SERVE, str(file)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert server.stdout is not None
        port, path = server.stdout.readline().split()
        shell = f"set -o pipefail; curl -sf http://127.0.0.1:{port}{path} | tee {folder}/copy | sha256sum"
        ours, theirs = [], []
        for run in range(options.runs):
            theirs.append(timed(["bash", "-c", shell]))
            (folder / "copy").unlink()
            ours.append(timed([sys.executable, "-c", PULL, port, str(folder / f"store{run}")]))
            shutil.rmtree(folder / f"store{run}")
        server.kill()
        ratio = statistics.median(theirs) / statistics.median(ours)
        facts = {"bytes": file.stat().st_size, "pull_s": ours, "curl_tee_sha256sum_s": theirs, "ratio": round(ratio, 3)}
        print(json.dumps(facts))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
