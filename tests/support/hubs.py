"""A hub and a registry made of a local `Origin`: the routes that edgellm's sources ask."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf_bytes import F32, GGUFBytes
from tests.support.origin import Behaviour, Origin, Reply, Request

COMMIT = "c" * 40


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model_file(path: Path, n_bytes: int = 1 << 20, seed: int = 1) -> Path:
    """A sound GGUF file with a tensor of random bytes."""
    data = np.random.default_rng(seed).integers(0, 256, n_bytes // 4 * 4, dtype=np.uint8).tobytes()
    out = GGUFBytes().text("general.architecture", "llama").text("general.name", path.stem)
    return out.tensor("t.weight", F32, [len(data) // 4], data).write(path)


def serve_hub(origin: Origin, repo: str, files: dict[str, Path], cdn: Origin | None = None) -> dict[str, Behaviour]:
    """Serves a repository as the Hugging Face hub does: listing, resolve with a redirect (to `cdn`, where given)."""
    store = cdn or origin
    how = {}
    for name, path in files.items():
        how[name] = store.file(f"/cdn/{name}", path)

    def answer(request: Request) -> Reply | None:
        if re.fullmatch(rf"/api/models/{repo}/revision/(main|v2|{COMMIT})", request.path):
            siblings: list[dict[str, Any]] = [{"rfilename": "README.md", "size": 5, "blobId": "b"}]
            for name, path in files.items():
                size = path.stat().st_size
                siblings.append({"rfilename": name, "size": size, "lfs": {"sha256": sha256(path), "size": size}})
            return Reply(body=json.dumps({"sha": COMMIT, "gated": False, "siblings": siblings}).encode())
        match = re.fullmatch(rf"/{repo}/resolve/([^/]+)/(.*)", request.path)
        if match and match[2] in files:
            size = str(files[match[2]].stat().st_size)
            linked = {"X-Linked-Size": size, "X-Linked-Etag": f'"{sha256(files[match[2]])}"'}
            return Reply(302, headers={"Location": f"{store.url}/cdn/{match[2]}?sig=1", **linked})
        return None

    origin.handle(answer)
    return how


def serve_registry(
    origin: Origin, name: str, layers: list[tuple[str, Path]], tag: str = "latest", storage: Origin | None = None
) -> list[Behaviour]:
    """Serves one model by Ollama's registry protocol; blobs are redirected to `storage` where given."""
    config = json.dumps({"model_format": "gguf", "model_family": "llama", "file_type": "F32"}).encode()
    entries = [{"mediaType": t, "digest": f"sha256:{sha256(p)}", "size": p.stat().st_size} for t, p in layers]
    config_digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
    manifest = {"schemaVersion": 2, "layers": entries, "config": {"digest": config_digest, "size": len(config)}}
    manifest["config"]["mediaType"] = "application/vnd.docker.container.image.v1+json"  # type: ignore[index]
    store = storage or origin
    how = []
    for (_, path), entry in zip(layers, entries, strict=True):
        where = f"/storage/{entry['digest']}" if storage else f"/v2/{name}/blobs/{entry['digest']}"
        how.append(store.file(where, path))

    def answer(request: Request) -> Reply | None:
        if request.path == f"/v2/{name}/manifests/{tag}":
            return Reply(body=json.dumps(manifest).encode(), headers={"Content-Type": "text/plain"})
        if request.path == f"/v2/{name}/blobs/{config_digest}":
            return Reply(body=config)
        if storage and request.path.startswith(f"/v2/{name}/blobs/"):
            return Reply(307, headers={"Location": f"{storage.url}/storage/{request.path.rpartition('/')[2]}"})
        return None

    origin.handle(answer)
    return how
