"""The model store: names (manifests) that point at content-addressed blobs, under `config.home()`/models.

    manifests/<host>/<namespace>/<model>/<tag>   JSON
    blobs/sha256-<hex>                           checked before they get this name, never changed after
    split/<manifest digest>/<file name>          links that give a split model's blobs their names back
    partial/                                     what is under way: downloads (journal.py), uploads, imports

Blobs are written first, a manifest last and atomically, so a name that is there is whole. A model in use stays readable
when it is removed: the files are memory-mapped.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm import config
from edgellm.errors import ModelNotFound, RequestError, StoreError, UnsupportedModel
from edgellm.hub import manifest as mf
from edgellm.hub.disk import locked, make_folder, sync_folder, write_atomic, write_failed
from edgellm.hub.manifest import Layer, Manifest
from edgellm.hub.names import Name, as_path, is_demo, is_path, parse_name, parse_web_file
from edgellm.loader import check_file

__all__ = ["Store", "StoredModel", "find", "resolve"]

_log = logging.getLogger("edgellm.hub")
_LARGEST_TEXT = 4 << 20


@dataclass(frozen=True)
class StoredModel:
    """A model that is here, and what was stored beside it."""

    name: Name
    path: Path
    """Its (first) .gguf file."""
    digest: str
    """Bare hex SHA-256 that names this version of the model."""
    size: int
    """Bytes on disk."""
    modified_at: float
    """Unix seconds."""
    origin: str = "edgellm"
    """Whose store it lies in: "edgellm", "ollama" or "huggingface"; only ours is ever written."""
    template: str | None = None
    """A Jinja template that replaces the file's own."""
    shown_template: str | None = None
    """A Go template: shown, never run."""
    system: str | None = None
    params: dict[str, Any] | None = None
    messages: tuple[dict[str, str], ...] = ()
    license: tuple[str, ...] = ()
    draft: Path | None = None
    has_adapter: bool = False


class Store:
    """One store folder; the others on this machine are read through `foreign`."""

    def __init__(self, root: Path | None = None):
        self.root = config.home() / "models" if root is None else root
        self.blobs = self.root / "blobs"
        self.partial = self.root / "partial"
        self._manifests = self.root / "manifests"

    def blob_path(self, digest: str) -> Path:
        """Where the blob `sha256:<hex>` lies or will lie."""
        if not mf.valid_digest(digest):
            raise StoreError(f"{ascii(digest)[:100]} is not a digest")
        return self.blobs / digest.replace(":", "-")

    def has_blob(self, layer: Layer) -> bool:
        """Whether the blob is here, with its right size."""
        try:
            return self.blob_path(layer.digest).stat().st_size == layer.size
        except OSError:
            return False

    def names(self) -> list[Name]:
        """All names that have a manifest, in their first spelling."""
        return [name for name, _ in scan_manifests(self._manifests)]

    def existing(self, name: Name) -> Name | None:
        """The name in the spelling it was stored with; None where it is not stored."""
        return next((known for known in self.names() if known.folded == name.folded), None)

    def manifest(self, name: Name) -> Manifest | None:
        """The manifest of a stored name (any spelling), or None."""
        known = self.existing(name)
        return read_manifest(self._manifest_path(known), known) if known else None

    def get(self, name: Name) -> StoredModel | None:
        """The model of that name, or None."""
        known = self.existing(name)
        if known is None:
            return None
        path = self._manifest_path(known)
        return describe(known, read_manifest(path, known), path, self.model_path, self.blob_path, jinja=True)

    def models(self) -> list[StoredModel]:
        """All models of this store, newest first; what cannot be read is logged and left out."""
        found = []
        for name in self.names():
            try:
                model = self.get(name)
            except (StoreError, UnsupportedModel) as error:
                _log.warning("%s", error)
                continue
            found += [model] if model else []
        return sorted(found, key=lambda m: -m.modified_at)

    def model_path(self, manifest: Manifest, name: Name) -> Path:
        """The file to open for a manifest: its blob, or the first link of a split model."""
        layers = manifest.of_type(mf.MODEL)
        if not layers:
            raise UnsupportedModel(f"{name} holds no GGUF file; get it in GGUF form (see hf.co)")
        for layer in layers:
            if not self.has_blob(layer):
                raise StoreError(f"the data of {name} is missing or cut: {bring_back(name, manifest)}")
        if len(layers) == 1:
            return self.blob_path(layers[0].digest)
        return self._link_shards(manifest, layers, name)

    def write(self, name: Name, manifest: Manifest) -> Name:
        """Makes `name` point at a manifest whose blobs are all here; gives the name in its stored spelling."""
        with self.lock():
            missing = [layer for layer in manifest.blobs if not self.has_blob(layer)]
            if missing:
                raise StoreError(f"a blob of {name} is gone ({missing[0].digest}): {bring_back(name, manifest)}")
            known = self.existing(name) or name
            old = self.manifest(known)
            if old is None or old.raw != manifest.raw:
                write_atomic(self._manifest_path(known), manifest.raw)
            if old is not None and old.raw != manifest.raw:
                self._drop_unused(old)
        return known

    def add_bytes(self, media_type: str, data: bytes) -> Layer:
        """Stores a small blob and gives its layer."""
        layer = Layer(media_type, f"sha256:{mf.sha256_bytes(data)}", len(data))
        if not self.has_blob(layer):
            write_atomic(self.blob_path(layer.digest), data)
        return layer

    def adopt(self, file: Path, layer: Layer) -> None:
        """Moves a finished and verified file of the same disk to its blob name, durably."""
        make_folder(self.blobs)
        try:
            os.replace(file, self.blob_path(layer.digest))
            sync_folder(self.blobs)
        except OSError as error:
            raise write_failed(self.blob_path(layer.digest), error) from None

    def copy(self, source: Name, target: Name) -> Name:
        """Gives a model a second name; no data is copied."""
        manifest = self.manifest(source)
        if manifest is None:
            raise not_found(str(source), to_run=False)
        return self.write(target, manifest)

    def remove(self, name: Name) -> None:
        """Removes a name; its blobs go with their last reference."""
        with self.lock():
            known = self.existing(name)
            if known is None:
                raise not_found(str(name), to_run=False)
            path = self._manifest_path(known)
            try:
                manifest = read_manifest(path, known)
            except StoreError:
                manifest = None  # a damaged manifest can still be removed
            try:
                path.unlink()
                for folder in list(path.parents)[:3]:
                    if not any(folder.iterdir()):
                        folder.rmdir()
            except OSError as error:
                raise write_failed(path, error) from None
            if manifest is not None:
                self._drop_unused(manifest)

    def lock(self) -> AbstractContextManager[None]:
        """Held while manifests change, so that no blob is dropped between its arrival and its first reference."""
        return locked(self.root / "lock")

    def _manifest_path(self, name: Name) -> Path:
        return self._manifests / name.host / name.namespace / name.model / name.tag

    def _drop_unused(self, manifest: Manifest) -> None:
        used: set[str] = set()
        for name, path in scan_manifests(self._manifests):
            try:
                used |= {blob.digest for blob in read_manifest(path, name).blobs}
            except StoreError:
                _log.warning("the manifest of %s cannot be read; no data is removed", name)
                return
        if not any(path.read_bytes() == manifest.raw for _, path in scan_manifests(self._manifests)):
            shutil.rmtree(self.root / "split" / manifest.digest, ignore_errors=True)
        for blob in manifest.blobs:
            if blob.digest not in used:
                self.blob_path(blob.digest).unlink(missing_ok=True)

    def _link_shards(self, manifest: Manifest, layers: list[Layer], name: Name) -> Path:
        folder = self.root / "split" / manifest.digest
        names = [layer.name for layer in layers]
        if not all(names) or len(set(names)) != len(names):
            raise StoreError(f"{name}: the manifest does not name its files: {bring_back(name, manifest)}")
        try:
            for layer in layers:
                link = folder / layer.name
                if not os.path.lexists(link):
                    make_folder(folder)
                    link.symlink_to(os.path.relpath(self.blob_path(layer.digest), folder))
        except FileExistsError:
            pass  # another process made the same link
        except OSError as error:
            raise write_failed(folder / names[0], error) from None
        return folder / names[0]


def scan_manifests(folder: Path) -> Iterator[tuple[Name, Path]]:
    """Names and manifest files, exactly four levels deep; oddly named files are passed over."""
    try:
        os.listdir(folder)  # glob says nothing of a folder that it may not read
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"the model store {folder} cannot be read: {error.strerror}") from None
    for path in sorted(folder.glob("*/*/*/*")):
        try:
            host, namespace, model, tag = path.parts[-4:]
            name = Name(host, namespace, model, tag)
        except RequestError as error:
            _log.debug("%s: %s", path, error)
            continue
        if path.is_file():
            yield name, path


def read_manifest(path: Path, name: Name) -> Manifest:
    """Reads and checks one manifest file."""
    try:
        return Manifest.parse(path.read_bytes(), str(name))
    except OSError as error:
        raise StoreError(f"the manifest of {name} cannot be read: {error.strerror}") from None


def describe(
    name: Name,
    manifest: Manifest,
    path: Path,
    model_path: Callable[[Manifest, Name], Path],
    blob_path: Callable[[str], Path],
    *,
    jinja: bool,
) -> StoredModel:
    """What a manifest and its small blobs say."""

    def texts(*types: str) -> list[str]:
        return [_read_text(blob_path(layer.digest), layer, name, manifest) for layer in manifest.of_type(*types)]

    def text(*types: str) -> str | None:
        return next(iter(texts(*types)), None)

    def parsed(kind: str, wanted: type[Any]) -> Any:
        for one in texts(kind):
            try:
                value = json.loads(one)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, wanted):
                raise StoreError(f"{name}: its {kind.rpartition('.')[2]} blob is damaged: {bring_back(name, manifest)}")
            return value
        return wanted()

    drafts = manifest.of_type(mf.DRAFT)
    messages = [m for m in parsed(mf.MESSAGES, list) if isinstance(m, dict)]
    return StoredModel(
        name=name,
        path=model_path(manifest, name),
        digest=manifest.digest,
        size=manifest.size,
        modified_at=path.stat().st_mtime,
        template=text(mf.JINJA_TEMPLATE) if jinja else None,
        shown_template=text(mf.GO_TEMPLATE, mf.OLD_GO_TEMPLATE),
        system=text(mf.SYSTEM),
        params=parsed(mf.PARAMS, dict),
        messages=tuple({"role": str(m.get("role")), "content": str(m.get("content"))} for m in messages),
        license=tuple(texts(mf.LICENSE)),
        draft=blob_path(drafts[0].digest) if drafts else None,
        has_adapter=bool(manifest.of_type(mf.ADAPTER)),
    )


def _read_text(path: Path, layer: Layer, name: Name, manifest: Manifest) -> str:
    if layer.size > _LARGEST_TEXT:
        raise StoreError(f"{name}: its {layer.media_type} blob has {layer.size} bytes, too many for a text")
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        raise StoreError(f"a blob of {name} is missing: {bring_back(name, manifest)}") from None


def bring_back(name: Name, manifest: Manifest) -> str:
    """What to do where a model's data is gone or damaged: what was created here, no server has."""
    if manifest.made_from:
        return (
            f"it was created here from {ascii(manifest.made_from)[1:-1][:200]}, so no pull brings it: create it again"
        )
    return f"run `edgellm pull {name}`"


def not_found(text: str, to_run: bool = True) -> ModelNotFound:
    """The error for a name that is nowhere here: with the command that would bring it, where it is needed `to_run`."""
    then = f"get it with: edgellm pull {text[:200]}" if to_run else "`edgellm list` shows what is"
    return ModelNotFound(f"no model named {ascii(text)[1:-1][:200]} is here; {then}")


def find(text: str, store: Store | None = None, to_run: bool = True) -> StoredModel:
    """The stored model that `text` names, in our store, Ollama's or the Hugging Face cache; never a path.

    Raises ModelNotFound (see `not_found`), or RequestError for what can be no name. A tag that was left out means
    `latest`, and for a repository of the hub the only tag that is stored.
    """
    from edgellm.hub import foreign

    store = store or Store()
    web = parse_web_file(text)
    name = web.name if web else parse_name(text)
    model = store.get(name)
    if model is None and name.is_hugging_face and name.tag == "latest":
        tags = [n for n in store.names() if n.folded[:3] == name.folded[:3]]
        model = store.get(tags[0]) if len(tags) == 1 else None
    model = model or foreign.find(name)
    if model is None:
        raise not_found(text, to_run)
    if model.has_adapter:
        raise UnsupportedModel(f"{name} needs a LoRA adapter, which edgellm cannot apply; use a merged model")
    return model


def resolve(text: str, store: Store | None = None) -> Path:
    """The .gguf file for what a user typed as MODEL: a path, a stored name, or `demo`, which is fetched on first use.

    Raises ModelNotFound with the command that would bring it, or what `check_file` says of a path.
    """
    if is_path(text):
        path = as_path(text)
        check_file(path, shown=text)
        return path
    store = store or Store()
    try:
        return find(text, store).path
    except ModelNotFound:
        if not is_demo(text):
            raise
    from edgellm.hub import demo

    return demo.fetch(store).path


def list_models(store: Store | None = None) -> list[StoredModel]:
    """Every model on this machine, newest first: ours, then what Ollama and the Hugging Face cache have besides."""
    from edgellm.hub import foreign

    own = (store or Store()).models()
    taken = {model.name.folded for model in own}
    others = [model for model in foreign.list_models() if model.name.folded not in taken]
    return sorted([*own, *others], key=lambda m: -m.modified_at)
