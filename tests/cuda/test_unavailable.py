"""Without a GPU the backend says so in one line, and nothing else of edgellm touches CUDA."""

from __future__ import annotations

import os
import subprocess
import sys


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_cuda_backend_without_a_gpu_says_what_is_missing() -> None:
    done = run(
        "from edgellm.backends import create\nfrom edgellm.errors import BackendUnavailable\n"
        "try:\n    create('cuda')\nexcept BackendUnavailable as error:\n    print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 1
    assert "numba-cuda" in done.stdout or "GPU" in done.stdout


def test_nothing_else_imports_cuda() -> None:
    done = run(
        "import sys\nimport edgellm, edgellm.llm, edgellm.backends, edgellm.cli.main, edgellm.backends.cpu.backend\n"
        "print([m for m in sys.modules if m.startswith(('numba_cuda', 'numba.cuda', 'cuda'))])\n"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
