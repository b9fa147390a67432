"""Bringing a model into the store. Progress comes as plain objects, the same that Ollama's API streams."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.errors import GGUFError, PullError, StoreError
from edgellm.hub import demo
from edgellm.hub import manifest as mf
from edgellm.hub.details import config_bytes
from edgellm.hub.disk import check_room, make_folder, try_hold, try_lock
from edgellm.hub.download import download
from edgellm.hub.fetch import Fetcher, RateLimit
from edgellm.hub.journal import Partial
from edgellm.hub.manifest import Layer, Manifest
from edgellm.hub.names import is_demo
from edgellm.hub.sources import RemoteFile, RemoteModel, check_source, find_remote
from edgellm.hub.store import Store, StoredModel
from edgellm.hub.web import Web

__all__ = ["Event", "PullOptions", "partials", "pull", "pull_remote", "remove_partials"]

Event = dict[str, Any]


@dataclass(frozen=True)
class PullOptions:
    """How to pull. `limit_rate` in bytes/s; `stall_s`: a silent line is opened again after this; `retry_s` scales
    the waits between tries."""

    insecure: bool = False
    connections: int = 0
    """0: 4, or 8 for files of 1 GiB and more."""
    limit_rate: float = 0.0
    stall_s: float = 30.0
    retry_s: float = 1.0


def pull(
    text: str,
    store: Store | None = None,
    options: PullOptions | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    stop: threading.Event | None = None,
) -> StoredModel:
    """Brings the model that `text` names and gives it; what is here already is not fetched again.

    Events: `{"status": "pulling manifest"}`, `{"status": "pulling <12 hex>", "digest", "total", "completed"}`,
    `{"status": "verifying sha256 digest"}`, `{"status": "writing manifest"}`, `{"status": "success"}`. Raises
    RequestError, PullError, StoreError, ModelNotFound; after any of them, and after Ctrl-C or `stop`, the next call
    goes on where it was.
    """
    store, options = store or Store(), options or PullOptions()
    check_source(text, options.insecure)
    on_event({"status": "pulling manifest"})
    if is_demo(text):
        model = demo.fetch(store, lambda line: on_event({"status": line}))
        on_event({"status": "success"})
        return model
    with Web(options.insecure, options.stall_s) as web:
        return pull_remote(web, find_remote(web, text), store, options, on_event, stop or threading.Event())


def pull_remote(
    web: Web,
    remote: RemoteModel,
    store: Store,
    options: PullOptions,
    on_event: Callable[[Event], None],
    stop: threading.Event,
) -> StoredModel:
    """As `pull`, for a model that was found already."""
    _check_disk(store, remote)
    layers = [_bring(web, file, remote, store, options, on_event, stop) for file in remote.files]
    manifest = remote.manifest or _make_manifest(store, remote, layers)
    on_event({"status": "verifying sha256 digest"})  # each blob was, while it arrived
    on_event({"status": "writing manifest"})
    name = store.write(remote.name, manifest)
    on_event({"status": "success"})
    model = store.get(name)
    if model is None:
        raise StoreError(f"{name} was removed while it was pulled")
    return model


def partial_key(remote: RemoteModel, file: RemoteFile) -> str:
    """The name of a download in progress: the digest, or what tells one state of a URL's file from another."""
    if file.layer.digest:
        return file.layer.digest.replace(":", "-")
    told = f"{remote.name.folded} {file.layer.name} {file.layer.size} {file.etag}"
    return f"url-{hashlib.sha256(told.encode()).hexdigest()}"


def _bring(
    web: Web,
    file: RemoteFile,
    remote: RemoteModel,
    store: Store,
    options: PullOptions,
    on_event: Callable[[Event], None],
    stop: threading.Event,
) -> Layer:
    """One blob. Waits where another process brings the same one."""
    layer, key = file.layer, partial_key(remote, file)
    progress = _Progress(layer, key, on_event)
    while True:
        if layer.digest and store.has_blob(layer):
            progress(layer.size, last=True)
            return layer
        with try_lock(make_folder(store.partial) / f"{key}.lock") as held:
            if held:
                if layer.digest and store.has_blob(layer):
                    continue
                return _fetch(web, file, remote, store, options, progress, stop)
        on_event({"status": f"waiting for another process that pulls {progress.short}"})
        if stop.wait(0.5):
            raise PullError("stopped; what came is kept")


def _fetch(
    web: Web,
    file: RemoteFile,
    remote: RemoteModel,
    store: Store,
    options: PullOptions,
    progress: _Progress,
    stop: threading.Event,
) -> Layer:
    key = partial_key(remote, file)
    label = f"{remote.name}{f' ({file.layer.name})' if file.layer.name else ''}"
    partial = Partial(store.partial, key, file.layer.size, label)
    try:
        limit = RateLimit(options.limit_rate) if options.limit_rate > 0 else None
        fetcher = Fetcher(web, file.locate, file.layer.size, stop, limit=limit, retry_s=options.retry_s)
        found = download(fetcher, partial, file.layer.digest[7:], progress, options.connections)
        layer = file.layer
        if not layer.digest:
            layer = _check_unknown(partial, layer, found)
        partial.sync()
        store.adopt(partial.finish(), layer)
        (store.partial / f"{key}.lock").unlink(missing_ok=True)  # who waits for it finds the blob
    finally:
        partial.close()
    progress(layer.size, last=True)
    return layer


def _check_unknown(partial: Partial, layer: Layer, found: str) -> Layer:
    """A file that came without a digest: at least it must be a sound GGUF file."""
    from edgellm.loader.file import Shard

    try:
        Shard(partial.data)
    except GGUFError as error:
        partial.forget(list(partial.done))
        words = str(error).removeprefix(f"{partial.data}: ")
        raise PullError(f"what {partial.label} sent {words}") from None
    return Layer(layer.media_type, f"sha256:{found}", layer.size, layer.name)


def _make_manifest(store: Store, remote: RemoteModel, layers: list[Layer]) -> Manifest:
    """For sources without manifests. The config says what the file's header says."""
    paths = [store.blob_path(layer.digest) for layer in layers if layer.media_type == mf.MODEL]
    config = store.add_bytes(mf.CONFIG, config_bytes(paths, layers[0].name))
    return mf.make_manifest(layers, config, remote.source)


def _check_disk(store: Store, remote: RemoteModel) -> None:
    """Room for the whole of what is still to come, before the first byte."""
    needed = 0
    for file in remote.files:
        if file.layer.digest and store.has_blob(file.layer):
            continue
        data = store.partial / f"{partial_key(remote, file)}.data"
        needed += max(file.layer.size - _on_disk(data), 0)
    check_room(store.root, needed, str(remote.name))


def _on_disk(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


class _Progress:
    """Turns byte counts into events, about 16 a second."""

    def __init__(self, layer: Layer, key: str, on_event: Callable[[Event], None]):
        self.short = layer.hex[:12] if layer.digest else (layer.name or key)[:60]
        self._layer, self._on_event = layer, on_event
        self._next = 0.0

    def __call__(self, completed: int, last: bool = False) -> None:
        now = time.monotonic()
        if not last and now < self._next:
            return
        self._next = now + 0.06
        event: Event = {"status": f"pulling {self.short}", "digest": self._layer.digest, "total": self._layer.size}
        self._on_event({**event, "completed": completed} if completed else event)


def partials(store: Store) -> list[dict[str, Any]]:
    """Downloads that are not finished: `key`, `label`, `size`, `completed` (bytes), `bad` (whole digest was wrong),
    `left`: no download, but what a killed upload or create left, which nothing can go on with."""
    found = []
    for journal in sorted(store.partial.glob("*.journal")):
        entry = {"key": journal.stem, "label": journal.stem, "size": 0, "completed": 0, "bad": False, "left": False}
        try:
            head, *lines = journal.read_bytes().decode("ascii", "replace").split("\n")
            data = json.loads(head)
            size, part = int(data["size"]), int(data["part_size"])
            entry |= {"label": str(data["label"]), "size": size, "bad": data["bad"] is True}
            entry["completed"] = min(len({line.split(" ")[0] for line in lines[:-1]}) * part, size)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a damaged journal is shown as it is, so that it can be removed
        found.append(entry)
    return found + [
        {"key": path.name, "label": path.name, "size": size, "completed": size, "bad": False, "left": True}
        for path, size in _left_behind(store)
    ]


def _left_behind(store: Store) -> list[tuple[Path, int]]:
    """Files of uploads and creates that no process writes any more, with their sizes."""
    found = []
    for path in sorted(path for prefix in ("import-", "upload-") for path in store.partial.glob(f"{prefix}*")):
        with try_hold(path) as held:
            if held:
                found.append((path, path.stat().st_size))
    return found


def remove_partials(store: Store, text: str = "") -> list[str]:
    """Removes unfinished downloads (those whose label or key holds `text`; empty: all); gives their labels.

    One that a running process is bringing is left alone, and StoreError says so.
    """
    removed = []
    for entry in partials(store):
        if text.lower() not in entry["label"].lower() and text.lower() not in entry["key"].lower():
            continue
        if entry["left"]:
            with try_hold(store.partial / entry["key"]) as held:
                if held:
                    (store.partial / entry["key"]).unlink()
                    removed.append(entry["label"])
            continue
        with try_lock(store.partial / f"{entry['key']}.lock") as held:
            if not held:
                raise StoreError(f"{entry['label']} is being pulled right now; stop that first")
            for ending in ("data", "journal", "lock"):
                (store.partial / f"{entry['key']}.{ending}").unlink(missing_ok=True)
        removed.append(entry["label"])
    return removed
