"""Without numba-cuda or a GPU the backend says what is missing in one line; nothing else of edgellm touches CUDA."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.goldens import DATA

MODEL = DATA / "goldens" / "llama" / "llama-f16.gguf"
WITHOUT_NUMBA_CUDA = "import sys; sys.modules['numba_cuda'] = None\n"
COMMAND = "import sys; from edgellm.cli.main import main; sys.exit(main(sys.argv[1:]))"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)


def reason(prefix: str) -> str:
    done = run(
        f"{prefix}from edgellm.backends import create\nfrom edgellm.errors import BackendUnavailable\n"
        "try:\n    create('cuda')\nexcept BackendUnavailable as error:\n    print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return line


def test_without_the_package() -> None:
    assert reason(WITHOUT_NUMBA_CUDA) == ("the cuda backend needs the package numba-cuda: pip install 'edgellm[cuda]'")


def test_without_a_gpu_the_command_line_and_doctor_say_the_same() -> None:
    why = reason("")
    assert "numba-cuda" in why or "GPU" in why
    done = run(COMMAND, "run", str(MODEL), "hello", "--backend", "cuda", "--local", "-n", "1")
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert why in line
    doctor = run("from edgellm.cli.doctor import _backend; print(_backend('cuda'))")
    assert doctor.stdout.strip() == why


def test_nothing_else_imports_cuda() -> None:
    done = run(
        "import sys\nimport edgellm, edgellm.llm, edgellm.backends, edgellm.cli.main, edgellm.backends.cpu.backend\n"
        "print([m for m in sys.modules if m.startswith(('numba_cuda', 'numba.cuda', 'cuda'))])\n"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
