"""The models a server knows, as its routes need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgellm.hub.store import Store

__all__ = ["Catalog", "ModelDetails", "ModelRecord"]


@dataclass(frozen=True)
class ModelRecord:
    """One stored model: where its file lies and what was stored beside it."""

    name: str
    """The shortest full form, with the tag: `llama3.2:latest`."""
    path: Path
    digest: str
    """Bare hex SHA-256 that names this version of the model."""
    size: int
    """Bytes on disk."""
    modified_at: float
    """Unix seconds."""
    template: str | None = None
    """A Jinja template stored beside the file; None: the file's own."""
    shown_template: str | None = None
    """A Go template of an Ollama model: shown, never run."""
    system: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    """Option names and values, as in a Modelfile's PARAMETER lines."""
    messages: tuple[dict[str, str], ...] = ()
    license: tuple[str, ...] = ()
    draft: Path | None = None
    """A draft model for speculation."""
    origin: str = "file"
    """Whose store it lies in: `edgellm`, `ollama`, `huggingface`; `file`: none, it was named on the command line."""
    parent: str = ""


class Catalog(Protocol):
    """Finding, listing and changing stored models. Methods block on files: routes call them in a thread."""

    store: Store
    """Where pulls and creates put models."""

    def find(self, name: str) -> ModelRecord:
        """The model a client means. Raises ModelNotFound, or RequestError for what can be no name."""
        ...

    def full_name(self, name: str) -> str:
        """The name with its tag, in its shortest form. Raises RequestError for what can be no name."""
        ...

    def list(self) -> list[ModelRecord]:
        """All models, newest first."""
        ...

    def details(self, record: ModelRecord) -> ModelDetails:
        """What the file's header says."""
        ...

    def metadata(self, record: ModelRecord) -> dict[str, Any]:
        """All of the file's metadata, long arrays included."""
        ...

    def copy(self, source: str, destination: str) -> None:
        """Gives a model a second name."""
        ...

    def delete(self, name: str) -> None:
        """Removes a name, and its data when no other name needs it."""
        ...


@dataclass(frozen=True)
class ModelDetails:
    """From a model file's header."""

    metadata: Mapping[str, Any]
    family: str
    parameter_size: str
    quantization_level: str
    parameter_count: int
    context_length: int
    embedding_length: int
    chat_template: str
    capabilities: tuple[str, ...]
