"""The application of a real server, from its settings."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette

from edgellm.server.app import create_app
from edgellm.server.heap import settle
from edgellm.server.hub_catalog import HubCatalog
from edgellm.server.loading import Loader
from edgellm.server.settings import ServerSettings

__all__ = ["build_app"]


def build_app(settings: ServerSettings, models: Sequence[str] = ()) -> Starlette:
    """The application. `models` (names, or paths of .gguf files) are loaded when it starts.

    Raises ModelNotFound for one that is not here.
    """
    from edgellm.hub.names import as_path, is_path
    from edgellm.llm import memory_budget

    catalog = HubCatalog()
    first = [catalog.add_file(as_path(model)) if is_path(model) else catalog.find_or_fetch(model) for model in models]
    budget = settings.memory or memory_budget(settings.backend)
    return create_app(settings, catalog, Loader(settings, budget), budget, preload=first, tidy=settle)
