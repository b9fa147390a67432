"""A store with models in it, in a home folder of its own, and a server over it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgellm import config
from edgellm.hub import manifest as mf
from edgellm.hub.names import parse_name
from edgellm.hub.store import Store
from edgellm.server.hub_catalog import HubCatalog
from edgellm.server.loading import Loader
from edgellm.server.settings import ServerSettings
from tests.server.live import Live, live

BUDGET = 4 << 30


def store_model(store: Store, name: str, path: Path, **small: tuple[str, bytes]) -> str:
    """Puts a file into the store under a name, with small blobs beside it; the manifest's digest."""
    layers = [store.add_bytes(mf.MODEL, path.read_bytes())]
    layers += [store.add_bytes(kind, value) for kind, value in small.values()]
    manifest = mf.make_manifest(layers, store.add_bytes(mf.CONFIG, b"{}"))
    store.write(parse_name(name), manifest)
    return manifest.digest


@contextmanager
def own_home(folder: Path) -> Iterator[Store]:
    """Within the block nothing is read or written outside `folder`, but for compiled kernels, which take minutes."""
    kernels = config.home() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "kernels").symlink_to(kernels)
    places = {"EDGELLM_HOME": folder, "OLLAMA_MODELS": folder / "no-ollama", "HF_HUB_CACHE": folder / "no-hub"}
    before: Mapping[str, str | None] = {name: os.environ.get(name) for name in places}
    os.environ.update({name: str(place) for name, place in places.items()})
    try:
        yield Store()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def live_store(store: Store, backend: str = "reference", **settings: Any) -> Iterator[Live]:
    """A server over `store`."""
    chosen = ServerSettings(backend=backend, **settings)
    with live(HubCatalog(store), Loader(chosen, BUDGET), BUDGET, backend=backend, **settings) as running:
        yield running
