"""Making a model from another: the same weights with other settings beside them, or a file taken into the store."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgellm.errors import ModelNotFound
from edgellm.hub import manifest as mf
from edgellm.hub import store as st
from edgellm.hub.details import config_bytes
from edgellm.hub.disk import check_room, scratch, write_failed
from edgellm.hub.manifest import Layer
from edgellm.hub.modelfile import Modelfile, check_template
from edgellm.hub.names import as_path, is_path, parse_name
from edgellm.hub.store import Store, StoredModel
from edgellm.loader import check_file, open_gguf

__all__ = ["create", "import_file"]

_CHUNK = 4 << 20
_REPLACED_BY = {
    "template": (mf.JINJA_TEMPLATE, mf.GO_TEMPLATE, mf.OLD_GO_TEMPLATE),
    "system": (mf.SYSTEM,),
    "params": (mf.PARAMS,),
    "messages": (mf.MESSAGES,),
    "license": (mf.LICENSE,),
}


def create(
    text: str,
    modelfile: Modelfile,
    folder: Path,
    store: Store | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> StoredModel:
    """Stores the model that a Modelfile describes under the name `text`. `folder`: where relative paths start.

    Weights that lie in edgellm's store are shared; a file, or a model of another program's store, is copied in.
    """
    store, name = store or Store(), parse_name(text)
    check_template(modelfile.template)
    layers = _base_layers(modelfile.source, folder, store, say)
    blobs: dict[str, list[bytes]] = {
        # An empty one renders no prompt at all: as in Ollama, whose clients send it for none, the base's stays.
        "template": [modelfile.template.encode()] if modelfile.template else [],
        "system": [modelfile.system.encode()] if modelfile.system is not None else [],
        "params": [_json({**_stored_params(store, layers), **modelfile.params})] if modelfile.params else [],
        "messages": [_json(modelfile.messages)] if modelfile.messages else [],
        "license": [text.encode() for text in modelfile.license],
    }
    for part, values in blobs.items():
        kinds = _REPLACED_BY[part]
        if values:
            layers = [layer for layer in layers if layer.media_type not in kinds]
            layers += [store.add_bytes(kinds[0], value) for value in values]
    say("writing manifest")
    models = [layer for layer in layers if layer.media_type == mf.MODEL]
    config = store.add_bytes(mf.CONFIG, config_bytes([store.blob_path(m.digest) for m in models], models[0].name))
    made = store.get(store.write(name, mf.make_manifest(layers, config, made_from=modelfile.source)))
    if made is None:
        raise ModelNotFound(f"{name} was removed while it was made")
    return made


def import_file(path: Path, store: Store, say: Callable[[str], None] = lambda line: None) -> list[Layer]:
    """Copies a .gguf (all files of a split model) into the store. Raises GGUFError for what is none."""
    with open_gguf(path) as model:
        paths = model.paths
    check_room(store.root, sum(part.stat().st_size for part in paths), path.name)
    return [_import_one(part, store, say) for part in paths]


def _base_layers(source: str, folder: Path, store: Store, say: Callable[[str], None]) -> list[Layer]:
    path = as_path(source)
    path = path if path.is_absolute() else folder / path
    if is_path(source) or path.is_file():
        check_file(path, shown=f"FROM {source}")
        return import_file(path, store, say)
    st.resolve(source, store)  # fetches `demo`, and says what to pull where the name is not here
    model = st.find(source, store)
    if model.origin == "edgellm":
        manifest = store.manifest(model.name)
        assert manifest is not None
        return list(manifest.layers)
    layers = import_file(model.path, store, say)
    texts = [(mf.SYSTEM, model.system), *((mf.LICENSE, text) for text in model.license)]
    layers += [store.add_bytes(kind, text.encode()) for kind, text in texts if text]
    extras: Sequence[tuple[str, Any]] = ((mf.PARAMS, model.params), (mf.MESSAGES, list(model.messages)))
    return layers + [store.add_bytes(kind, _json(value)) for kind, value in extras if value]


def _stored_params(store: Store, layers: list[Layer]) -> dict[str, Any]:
    for layer in layers:
        if layer.media_type == mf.PARAMS:
            try:
                found = json.loads(store.blob_path(layer.digest).read_bytes())
            except (OSError, ValueError):
                return {}
            return found if isinstance(found, dict) else {}
    return {}


def _import_one(path: Path, store: Store, say: Callable[[str], None]) -> Layer:
    say(f"copying {path.name}")
    digest = hashlib.sha256()
    size = 0
    name = path.name if mf.safe_file_name(path.name) else ""
    try:
        with scratch(store.partial, "import-") as (out, temporary), open(path, "rb") as source:
            while block := source.read(_CHUNK):
                digest.update(block)
                out.write(block)
                size += len(block)
            out.flush()
            os.fsync(out.fileno())
            layer = Layer(mf.MODEL, f"sha256:{digest.hexdigest()}", size, name)
            if not store.has_blob(layer):
                store.adopt(temporary, layer)
    except OSError as error:
        raise write_failed(store.partial / "import", error) from None
    return layer


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
