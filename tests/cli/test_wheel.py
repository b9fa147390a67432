"""The built wheel, installed somewhere else, is whole: it chats with a tiny model, and every module comes from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.structure.sources import ROOT, package_modules
from tests.support.tiny import tiny_gguf

pytest.importorskip("setuptools", minversion="77", reason="building a wheel needs setuptools 77 (the test extra)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # Built from a copy: setuptools leaves `build/` and `*.egg-info` beside the sources.
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in tracked:
        if name.startswith(("edgellm/", "backends/", "models/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is absent from the `packages`" not in done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run_there(site: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "EDGELLM_HOME": str(cwd / "home")}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for module, path in package_modules().items():
        file = module.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
        assert file in names
    for folder in ("backends/metal/kernels", "edgellm/server/ui"):
        for path in (ROOT / folder).iterdir():
            assert f"{folder if folder.startswith('edgellm') else 'edgellm/' + folder}/{path.name}" in names
    assert "edgellm/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "backends/", "models/"))]


def test_modules_come_from_the_wheel(site: Path, tmp_path: Path) -> None:
    code = "import edgellm, edgellm.models.registry, edgellm.backends.base as b; print(edgellm.__file__, b.__file__)"
    done = run_there(site, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(Path(name).is_relative_to(site) for name in done.stdout.split())


def test_the_wheel_chats(site: Path, tmp_path: Path) -> None:
    model = tiny_gguf(tmp_path / "tiny.gguf")
    words = ["run", str(model), "Hello", "--json", "-n", "5", "--seed", "1", "--backend", "reference"]
    done = run_there(site, "-m", "edgellm", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["finish_reason"] in ("length", "stop")
    assert len(answer["ids"]) == answer["new_tokens"] <= 5
