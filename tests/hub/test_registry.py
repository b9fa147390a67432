"""Pull, list, run, resume and remove against a real OCI registry: Debian's docker-registry, with a model pushed through
its own API (`apt-get install docker-registry`)."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from edgellm.cli.main import main
from edgellm.errors import PullError
from edgellm.hub import manifest as mf
from edgellm.hub.manifest import sha256_bytes
from edgellm.hub.pull import PullOptions, partials, pull
from edgellm.hub.store import Store
from edgellm.loader import open_gguf
from tests.support.hubs import model_file

REGISTRY = shutil.which("docker-registry")
pytestmark = pytest.mark.skipif(REGISTRY is None, reason="docker-registry is not installed (apt-get install it)")

CONFIG = """version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """A running registry's address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "config.yml").write_text(CONFIG.format(root=tmp_path / "registry", port=port))
    assert REGISTRY is not None
    command = [REGISTRY, "serve", str(tmp_path / "config.yml")]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                httpx.get(f"http://127.0.0.1:{port}/v2/")
                break
            except httpx.HTTPError:
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def push(registry: str, name: str, tag: str, model: bytes, **texts: str) -> None:
    """Pushes a model as `ollama push` does: blobs, then the manifest."""
    base = f"http://{registry}/v2/{name}"
    layers = [(mf.MODEL, model), *((f"application/vnd.ollama.image.{k}", v.encode()) for k, v in texts.items())]
    entries = []
    for kind, data in [*layers, (mf.CONFIG, b'{"model_format": "gguf"}')]:
        digest = f"sha256:{sha256_bytes(data)}"
        place = httpx.post(f"{base}/blobs/uploads/").headers["location"]
        mark = "&" if "?" in place else "?"
        assert httpx.put(f"{place}{mark}digest={digest}", content=data, timeout=60).status_code == 201
        entries.append({"mediaType": kind, "digest": digest, "size": len(data)})
    manifest = {"schemaVersion": 2, "mediaType": mf.MANIFEST_TYPE, "config": entries.pop(), "layers": entries}
    headers = {"Content-Type": mf.MANIFEST_TYPE}
    answer = httpx.put(f"{base}/manifests/{tag}", content=json.dumps(manifest).encode(), headers=headers)
    assert answer.status_code == 201, answer.text


def test_pull_list_open_rm(registry: str, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_file(tmp_path / "m.gguf", 5 << 20)
    push(registry, "library/m", "q4_k_m", model.read_bytes(), system="Be brief.", params='{"top_k": 3}')
    name = f"{registry}/library/m:q4_k_m"
    assert main(["pull", f"http://{name}", "--insecure", "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert facts["name"] == name and Path(facts["path"]).read_bytes() == model.read_bytes()
    assert "success" in err and "100%" in err
    assert main(["list", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["models"]
    assert entry["name"] == name and entry["digest"] == facts["digest"]
    found = store.models()[0]
    assert found.system == "Be brief." and found.params == {"top_k": 3}
    with open_gguf(found.path) as file:
        assert "t.weight" in file.tensors
    assert main(["verify", name.upper().replace("LIBRARY", "library")]) == 0
    assert main(["cp", name, "mine"]) == 0 and main(["rm", name]) == 0 and found.path.exists()
    assert main(["rm", "MINE:latest"]) == 0 and not found.path.exists()
    assert list((store.root / "blobs").iterdir()) == []


def test_resume_after_the_registry_went_away(registry: str, store: Store, tmp_path: Path) -> None:
    model = model_file(tmp_path / "m.gguf", 5 << 20)
    push(registry, "library/m", "latest", model.read_bytes())
    name = f"http://{registry}/library/m"
    options = PullOptions(insecure=True, limit_rate=8e6)
    import threading

    stop = threading.Event()
    with pytest.raises(Exception, match="stopped"):
        pull(name, store, options, lambda e: stop.set() if e.get("completed", 0) > 1 << 20 else None, stop)
    (entry,) = partials(store)
    assert 0 < entry["completed"] < entry["size"]
    assert pull(name, store, PullOptions(insecure=True)).path.read_bytes() == model.read_bytes()
    assert partials(store) == []


def test_what_is_not_there(registry: str, store: Store) -> None:
    with pytest.raises(PullError, match="pull model manifest: file does not exist"):
        pull(f"http://{registry}/library/none", store, PullOptions(insecure=True))
    with pytest.raises(PullError, match="--insecure"):
        pull(f"{registry}/library/none", store)  # https was tried, and the registry does not speak it
    assert main(["pull", f"http://{registry}/library/none"]) == 1
