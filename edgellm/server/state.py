"""What all routes of one server share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from edgellm.errors import EdgeLLMError
from edgellm.server.bridge import Bridge
from edgellm.server.catalog import Catalog
from edgellm.server.manager import ModelManager
from edgellm.server.metrics import Metrics
from edgellm.server.settings import ServerSettings

__all__ = ["ServerState"]


@dataclass
class ServerState:
    """Made once per server, in its event loop; lies in `app.state`."""

    settings: ServerSettings
    catalog: Catalog
    manager: ModelManager
    metrics: Metrics
    bridge: Bridge
    failure: EdgeLLMError | None = None
    """What ends the server as soon as it has started: a model that it was to load at once and could not."""
    draining: bool = False
    """Set when the server was told to stop: new work is refused, running answers go on for a while."""
    downloads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, "edgellm-pull"))
    """Threads for pulls and creates, which take hours: the loop's own pool must stay free for prompts."""
    embedders: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16, "edgellm-embed"))
    """Threads that wait for vectors, for the same reason."""
    running: set[Any] = field(default_factory=set)
    """Generations whose answers are being sent."""
