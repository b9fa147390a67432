"""Manifests: which blobs make up a model. The OCI form that Ollama's registry and store use."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from edgellm.errors import StoreError

__all__ = ["CONFIG", "Layer", "Manifest", "make_manifest", "sha256_bytes", "valid_digest"]

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
_OLLAMA = "application/vnd.ollama.image."
MODEL, ADAPTER, DRAFT, PROJECTOR = _OLLAMA + "model", _OLLAMA + "adapter", _OLLAMA + "draft", _OLLAMA + "projector"
SYSTEM, PARAMS, MESSAGES, LICENSE = _OLLAMA + "system", _OLLAMA + "params", _OLLAMA + "messages", _OLLAMA + "license"
GO_TEMPLATE, OLD_GO_TEMPLATE = _OLLAMA + "template", _OLLAMA + "prompt"
JINJA_TEMPLATE = "application/vnd.edgellm.image.template.jinja"
MOST_LAYERS = 2000
LARGEST_MANIFEST = 4 << 20
_SOURCE = "edgellm.source"
_CREATED = "created from "
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+ -]{0,254}\Z")


@dataclass(frozen=True)
class Layer:
    """One blob of a model. `digest` is `sha256:<hex>`; `name`: its file name, where it has one."""

    media_type: str
    digest: str
    size: int
    name: str = ""

    @property
    def hex(self) -> str:
        """The digest without its prefix."""
        return self.digest[7:]

    def as_json(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        entry: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return {**entry, "name": self.name} if self.name else entry


@dataclass(frozen=True)
class Manifest:
    """A manifest's bytes as received (their SHA-256 names this version of the model) and what they say."""

    raw: bytes
    layers: tuple[Layer, ...]
    config: Layer | None

    @property
    def digest(self) -> str:
        """Bare hex SHA-256 of the bytes."""
        return sha256_bytes(self.raw)

    @property
    def size(self) -> int:
        """Bytes of all blobs."""
        return sum(blob.size for blob in self.blobs)

    @property
    def blobs(self) -> tuple[Layer, ...]:
        """Layers, then the config."""
        return (*self.layers, self.config) if self.config else self.layers

    @property
    def made_from(self) -> str:
        """What `edgellm create` made the model from; empty for a model that was pulled."""
        if _CREATED.encode() not in self.raw:
            return ""
        annotations = json.loads(self.raw).get("annotations")
        source = annotations.get(_SOURCE) if isinstance(annotations, dict) else None
        return source[len(_CREATED) :] if isinstance(source, str) and source.startswith(_CREATED) else ""

    def of_type(self, *media_types: str) -> list[Layer]:
        """Layers of these media types, in order."""
        return [layer for layer in self.layers if layer.media_type in media_types]

    @staticmethod
    def parse(raw: bytes, label: str) -> Manifest:
        """Checks and reads a manifest; StoreError where it is not sound. Nothing in it is trusted."""
        if len(raw) > LARGEST_MANIFEST:
            raise StoreError(f"the manifest of {label} has {len(raw)} bytes, which no manifest needs")
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError):
            raise StoreError(f"the manifest of {label} is not JSON") from None
        if isinstance(data, dict) and "manifests" in data and "layers" not in data:
            raise StoreError(f"{label} has a list of variants for a manifest, which is not supported")
        if not isinstance(data, dict) or not isinstance(data.get("layers"), list):
            raise StoreError(f"the manifest of {label} has no list of layers")
        if len(data["layers"]) > MOST_LAYERS:
            raise StoreError(f"the manifest of {label} has more than {MOST_LAYERS} layers")
        layers = tuple(_layer(entry, label) for entry in data["layers"])
        config = data.get("config")
        return Manifest(raw, layers, _layer(config, label) if config else None)


def valid_digest(text: object) -> bool:
    """Whether it is `sha256:` and 64 hexadecimal digits: only then may it become a file's name."""
    return isinstance(text, str) and _DIGEST.match(text) is not None


def safe_file_name(text: str) -> bool:
    """Whether it may become a file's name in the store."""
    return _FILE_NAME.match(text) is not None


def sha256_bytes(data: bytes) -> str:
    """Bare hex SHA-256."""
    return hashlib.sha256(data).hexdigest()


def make_manifest(layers: list[Layer], config: Layer, source: str = "", made_from: str = "") -> Manifest:
    """A manifest of our own. `source`: where the model was pulled from; `made_from`: what it was created from."""
    data: dict[str, Any] = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config.as_json()}
    data["layers"] = [layer.as_json() for layer in layers]
    if source or made_from:
        data["annotations"] = {_SOURCE: source or _CREATED + made_from}
    raw = json.dumps(data, indent=1).encode()
    return Manifest(raw, tuple(layers), config)


def _layer(entry: Any, label: str) -> Layer:
    if not isinstance(entry, dict):
        raise StoreError(f"the manifest of {label} has a layer that is no object")
    digest, size, kind = entry.get("digest"), entry.get("size"), entry.get("mediaType")
    if not isinstance(digest, str) or not valid_digest(digest):
        raise StoreError(f"the manifest of {label} has an invalid digest: {ascii(digest)[:100]}")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 50:
        raise StoreError(f"the manifest of {label} has an invalid size: {ascii(size)[:40]}")
    if not isinstance(kind, str):
        raise StoreError(f"the manifest of {label} has a layer without a media type")
    name = entry.get("name", "")
    return Layer(kind, digest, size, name if isinstance(name, str) and safe_file_name(name) else "")
