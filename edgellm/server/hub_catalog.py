"""The catalog of a real server: the model store, other programs' stores, and files named when it was started."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from edgellm.errors import ModelNotFound, RequestError
from edgellm.hub import store as hub
from edgellm.hub.names import Name, parse_name
from edgellm.hub.store import Store, StoredModel
from edgellm.loader import check_file
from edgellm.server.catalog import ModelDetails, ModelRecord
from edgellm.server.gguf_details import read_details, read_metadata

__all__ = ["HubCatalog"]

_LIBRARY = ("registry.ollama.ai", "library")


class HubCatalog:
    """See `Catalog`. Thread-safe: nothing is kept but what a file's header said, by its time and size."""

    def __init__(self, store: Store | None = None):
        self.store = store or Store()
        self._files: dict[str, ModelRecord] = {}
        self._details: dict[tuple[str, float, int, str | None], ModelDetails] = {}

    def add_file(self, path: Path) -> ModelRecord:
        """Serves a file where it lies, under its own name. Raises ModelNotFound, or GGUFError for what is no file."""
        path = path.absolute()
        check_file(path)
        stem = re.sub(r"[^A-Za-z0-9_.-]+|\.\.+", "-", path.stem).strip("-.") or "model"
        name = Name(*_LIBRARY, stem[:96], "latest")
        facts = path.stat()
        digest = hashlib.sha256(f"{path}:{facts.st_size}:{facts.st_mtime_ns}".encode()).hexdigest()
        record = ModelRecord(str(name), path, digest, facts.st_size, facts.st_mtime)
        self._files[str(name).lower()] = record
        return record

    def find_or_fetch(self, name: str) -> ModelRecord:
        """As `find`, for the user at the command line: `demo` is fetched on first use."""
        hub.resolve(name, self.store)
        return self.find(name)

    def find(self, name: str) -> ModelRecord:
        """The model a client means. Never a path: a name goes through the grammar of names first.

        Raises ModelNotFound, RequestError (`invalid model name`), UnsupportedModel.
        """
        text = name.removesuffix(":local")
        if not text:
            raise ModelNotFound("no model is named")
        wanted = _parse(text)
        if wanted.tag == "cloud" or wanted.tag.endswith("-cloud"):
            raise ModelNotFound(f"{name} runs in Ollama's cloud; edgellm runs models on this machine only")
        given = self._files.get(str(wanted).lower())
        return given or _record(hub.find(text, self.store))

    def full_name(self, name: str) -> str:
        """The name with its tag, in its shortest form. Raises RequestError (`invalid model name`)."""
        return str(_parse(name.removesuffix(":local")))

    def list(self) -> list[ModelRecord]:
        """All models, newest first."""
        stored = [_record(model) for model in hub.list_models(self.store)]
        names = {record.name.lower() for record in self._files.values()}
        found = [*self._files.values(), *(record for record in stored if record.name.lower() not in names)]
        return sorted(found, key=lambda record: -record.modified_at)

    def details(self, record: ModelRecord) -> ModelDetails:
        """What the file's header says. Raises GGUFError, ModelNotFound for a file that is gone."""
        try:
            facts = record.path.stat()
        except OSError:
            raise ModelNotFound(f"the file of {record.name} is gone: {record.path}") from None
        key = (str(record.path), facts.st_mtime, facts.st_size, record.template)
        if key not in self._details:
            self._details[key] = read_details(record.path, record.template)
        return self._details[key]

    def metadata(self, record: ModelRecord) -> dict[str, Any]:
        """All of the file's metadata, long arrays included."""
        return read_metadata(record.path)

    def copy(self, source: str, destination: str) -> None:
        """Gives a stored model a second name."""
        record = self.find(source)
        target = _parse(destination)
        if record.origin != "edgellm":
            raise RequestError(f"{record.name} lies in {record.origin}'s store; only edgellm's own models are copied")
        self.store.copy(parse_name(record.name), target)

    def delete(self, name: str) -> None:
        """Removes a name of edgellm's own store."""
        record = self.find(name)
        if record.origin == "ollama":
            raise RequestError(f"{record.name} lies in Ollama's store; remove it with: ollama rm {record.name}")
        if record.origin != "edgellm":
            raise RequestError(f"{record.name} is not in edgellm's store ({record.path}); remove the file itself")
        self.store.remove(parse_name(record.name))


def _parse(text: str) -> Name:
    try:
        return parse_name(text)
    except RequestError:
        raise RequestError("invalid model name") from None


def _record(model: StoredModel) -> ModelRecord:
    return ModelRecord(
        name=str(model.name),
        path=model.path,
        digest=model.digest,
        size=model.size,
        modified_at=model.modified_at,
        origin=model.origin,
        template=model.template,
        shown_template=model.shown_template,
        system=model.system,
        params=model.params or {},
        messages=model.messages,
        license=model.license,
        draft=model.draft,
    )
