"""Models that other programs keep on this machine, read where they lie: Ollama's store and the Hugging Face cache.

Nothing here is ever written, renamed or removed: those folders are theirs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from edgellm.errors import EdgeLLMError, RequestError, StoreError, UnsupportedModel
from edgellm.hub import manifest as mf
from edgellm.hub.choice import choose_files, model_files, quant_label
from edgellm.hub.manifest import Manifest
from edgellm.hub.names import HF_HOST, Name
from edgellm.hub.store import StoredModel, describe, read_manifest, scan_manifests

__all__ = ["find", "hugging_face_caches", "list_models", "ollama_stores"]

_log = logging.getLogger("edgellm.hub")


def find(name: Name) -> StoredModel | None:
    """The model of that name in another program's store, or None."""
    for store in ollama_stores():
        for known, path in _ollama_names(store):
            if known.folded == name.folded:
                return _ollama_model(store, known, path)
    if name.is_hugging_face:
        for cache in hugging_face_caches():
            for folder in _repositories(cache):
                repo = folder.name.split("--")
                if [name.namespace.lower(), name.model.lower()] == [repo[1].lower(), "--".join(repo[2:]).lower()]:
                    return _cached(folder, name.tag)
    return None


def list_models() -> list[StoredModel]:
    """All GGUF models in other programs' stores; what cannot be read is logged and left out."""
    found: list[StoredModel] = []
    for store in ollama_stores():
        for name, path in _ollama_names(store):
            try:
                found.append(_ollama_model(store, name, path))
            except UnsupportedModel as error:
                _log.debug("%s", error)
            except EdgeLLMError as error:
                _log.warning("%s", error)
    for cache in hugging_face_caches():
        for folder in _repositories(cache):
            found += _cached_all(folder)
    return found


def ollama_stores() -> list[Path]:
    """Folders of Ollama stores that can be read: OLLAMA_MODELS, else the user's and the Linux service's."""
    given = os.environ.get("OLLAMA_MODELS", "").strip().strip("\"'")
    places = [given] if given else ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]
    return [folder for folder in map(_expanded, places) if _readable(folder)]


def hugging_face_caches() -> list[Path]:
    """The hub cache folder as huggingface_hub finds it: HF_HUB_CACHE, HF_HOME/hub, or the user's cache folder."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not given:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        given = os.path.join(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface"), "hub")
    folder = _expanded(given)
    return [folder] if _readable(folder) else []


def _expanded(place: str) -> Path:
    """`~` is a home folder; where there is none, nothing is there (Path.expanduser would raise)."""
    return Path(os.path.expanduser(place))


def _readable(folder: Path) -> bool:
    try:
        return folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)
    except OSError:
        return False


def _ollama_names(store: Path) -> Iterator[tuple[Name, Path]]:
    for kind in ("manifests", "manifests-v2"):
        try:
            found = list(scan_manifests(store / kind))
        except StoreError as error:
            _log.warning("%s", error)
            continue
        for name, path in found:
            host = {"ollama.com": "registry.ollama.ai", "huggingface.co": HF_HOST}.get(name.host, name.host)
            yield Name(host, name.namespace, name.model, name.tag), path


def _ollama_model(store: Path, name: Name, path: Path) -> StoredModel:
    def blob_path(digest: str) -> Path:
        plain = store / "blobs" / digest.replace(":", "-")
        old = store / "blobs" / digest
        return old if old.exists() and not plain.exists() else plain

    def model_path(manifest: Manifest, name: Name) -> Path:
        layers = manifest.of_type(mf.MODEL)
        if len(layers) != 1:
            raise UnsupportedModel(f"{name} in Ollama's store holds no GGUF file that edgellm could read")
        file = blob_path(layers[0].digest)
        if not file.is_file() or file.stat().st_size != layers[0].size:
            raise StoreError(f"the data of {name} in Ollama's store is missing or cut; pull it again there or here")
        return file

    model = describe(name, read_manifest(path, name), path, model_path, blob_path, jinja=False)
    return StoredModel(**{**vars(model), "origin": "ollama"})


def _repositories(cache: Path) -> list[Path]:
    return sorted(f for f in cache.glob("models--*--*") if f.is_dir())


def _snapshot(folder: Path) -> Path | None:
    """The snapshot that `main` points at, else the newest."""
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
        if commit.isalnum() and (folder / "snapshots" / commit).is_dir():
            return folder / "snapshots" / commit
    except (OSError, ValueError):
        pass
    snapshots = [f for f in folder.glob("snapshots/*") if f.is_dir()]
    return max(snapshots, key=lambda f: f.stat().st_mtime, default=None)


def _cached_files(folder: Path) -> tuple[Path | None, list[str]]:
    snapshot = _snapshot(folder)
    if snapshot is None:
        return None, []
    # a name may stand there while its blob is still incomplete: only links that lead somewhere count
    found = [f for f in snapshot.rglob("*") if f.suffix.lower() == ".gguf" and f.is_file()]
    return snapshot, [f.relative_to(snapshot).as_posix() for f in found]


def _cached(folder: Path, tag: str) -> StoredModel | None:
    snapshot, files = _cached_files(folder)
    if snapshot is None or not model_files(files):
        return None
    try:
        return _cached_model(folder, snapshot, choose_files(files, tag, folder.name))
    except EdgeLLMError:
        return None


def _cached_all(folder: Path) -> list[StoredModel]:
    snapshot, files = _cached_files(folder)
    found = []
    for file in model_files(files):
        try:
            assert snapshot is not None
            found.append(_cached_model(folder, snapshot, choose_files(files, file, folder.name)))
        except EdgeLLMError as error:
            _log.debug("%s: %s", folder, error)
    return found


def _cached_model(folder: Path, snapshot: Path, files: list[str]) -> StoredModel:
    repo = folder.name.split("--")
    try:
        name = Name(HF_HOST, repo[1], "--".join(repo[2:]), quant_label(files[0]))
    except RequestError as error:
        raise StoreError(f"{folder}: {error}") from None
    first = snapshot / files[0]
    blob = first.resolve().name  # the cache names a large file's blob by its sha256
    digest = blob if len(blob) == 64 else mf.sha256_bytes(str(first).encode())
    size = sum((snapshot / file).stat().st_size for file in files)
    return StoredModel(name, first, digest, size, first.stat().st_mtime, origin="huggingface")
