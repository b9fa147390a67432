"""Model names, and the places a model can come from.

`[http://|https://][host/][namespace/]model[:tag]`, as Ollama's tools read it: the tag stands after the last `:` behind
the last `/`, then model and namespace from the right, and what is left is the host. `hf.co/USER/REPO[:QUANT]`,
`hf:USER/REPO/FILE.gguf` and pasted links of the hub name a Hugging Face repository.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from edgellm.errors import RequestError

__all__ = ["DEFAULT_HOST", "HF_HOST", "Name", "WebFile"]
__all__ += ["as_path", "is_demo", "is_path", "parse_name", "parse_web_file"]

DEFAULT_HOST = "registry.ollama.ai"
HF_HOST = "hf.co"
_ALIASES = {"ollama.com": DEFAULT_HOST, "huggingface.co": HF_HOST, "www.huggingface.co": HF_HOST}
_LIMITS = {"host": 350, "namespace": 80, "model": 96, "tag": 128}
"""Longest parts. Ollama stops at 80; the hub's repositories have up to 96, and a file's name can be a tag."""
_SHAPES = {
    "host": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*\Z"),
    "namespace": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\Z"),
    "model": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z"),
    "tag": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z"),
}


@dataclass(frozen=True)
class Name:
    """One model's full name. Every part is safe as a folder or file name."""

    host: str
    namespace: str
    model: str
    tag: str
    insecure: bool = False
    """Typed with `http://`."""

    def __post_init__(self) -> None:
        for part, shape in _SHAPES.items():
            value = getattr(self, part)
            if not shape.match(value) or len(value) > _LIMITS[part] or ".." in value:
                signs = "- and _" if part == "namespace" else "-, _ and ."
                raise RequestError(f"{_shown(value)} cannot be its {part} (letters, digits, {signs})")

    def __str__(self) -> str:
        """The shortest form that means the same, always with the tag."""
        return f"{self.short}:{self.tag}"

    @property
    def short(self) -> str:
        """Without the tag; the default host and namespace are left out."""
        if self.host != DEFAULT_HOST:
            return f"{self.host}/{self.namespace}/{self.model}"
        return self.model if self.namespace == "library" else f"{self.namespace}/{self.model}"

    @property
    def folded(self) -> tuple[str, str, str, str]:
        """What two spellings of one name have in common: lookups ignore case."""
        return (self.host.lower(), self.namespace.lower(), self.model.lower(), self.tag.lower())

    @property
    def is_hugging_face(self) -> bool:
        """Whether the hub's plain route serves it."""
        return self.host.lower() == HF_HOST


@dataclass(frozen=True)
class WebFile:
    """A model named by a file: `file` in the repository `name` (tag = file name) of the hub, or at `url`."""

    name: Name
    file: str = ""
    url: str = ""
    revision: str = "main"


def parse_name(text: str) -> Name:
    """The name that `text` spells. Raises RequestError with the part that is wrong."""
    rest, insecure = text.strip(), False
    if not rest:
        raise RequestError("a model name is needed; none was given")
    scheme, separator, after = rest.partition("://")
    if separator:
        if scheme.lower() not in ("http", "https"):
            raise RequestError(f"{_shown(text)} is not a model name: the scheme {_shown(scheme)} is unknown")
        rest, insecure = after, scheme.lower() == "http"
    if rest[:3].lower() == "hf:":
        rest = f"{HF_HOST}/{rest[3:]}"
    before, colon, tag = rest.rpartition(":")
    if colon and "/" not in tag:
        rest = before
    else:
        tag = "latest"
    parts = rest.rsplit("/", 2)
    if len(parts) == 3 and "/" in parts[0]:
        raise RequestError(f"{_shown(text)} is not a model name: too many parts")
    model, namespace, host = [*reversed(parts), *["library", DEFAULT_HOST][len(parts) - 1 :]]
    host = _ALIASES.get(host.lower(), host)
    try:
        return Name(host, namespace, model, tag, insecure)
    except RequestError as error:
        raise RequestError(f"{_shown(text)} is not a model name: {error}") from None


def parse_web_file(text: str) -> WebFile | None:
    """`hf:USER/REPO/FILE.gguf`, a link to the hub or to any .gguf file; None for everything else."""
    if re.match(r"(hf:|hf\.co/|huggingface\.co/).*\.gguf\Z", text, re.IGNORECASE):
        words = re.sub(r"\A[^:/]*[:/]", "", text).split("/")
        if len(words) < 3:  # hf.co/USER/REPO:FILE.gguf is a name with a tag
            return None
        return _hub_file(words[0], words[1], "/".join(words[2:]))
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise RequestError(f"{_shown(text)} is no address: {error}") from None
    if parts.scheme.lower() not in ("http", "https") or not parts.path.lower().endswith(".gguf"):
        return None
    path = unquote(parts.path).strip("/")
    words = path.split("/")
    if (parts.hostname or "").lower() in ("huggingface.co", "hf.co") and len(words) >= 5:
        user, repo, kind, revision, *file = words
        if kind in ("resolve", "blob", "raw"):
            return _hub_file(user, repo, "/".join(file), revision)
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", words[-1][: -len(".gguf")]).strip("-.")[:96] or "model"
    host = parts.netloc.rpartition("@")[2]
    where = hashlib.sha256(f"{host}/{path}".encode()).hexdigest()[:8]
    name = Name(host, "files", re.sub(r"\.\.+", ".", stem), where, parts.scheme.lower() == "http")
    return WebFile(name, url=text)


def _hub_file(user: str, repo: str, file: str, revision: str = "main") -> WebFile:
    words = file.split("/")
    if not re.match(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z", revision) or any(w in ("", ".", "..") for w in words):
        raise RequestError(f"{_shown(file)} is not a path in a repository")
    tag = words[-1]
    if len(tag) > _LIMITS["tag"]:
        tag = f"{tag[:80]}-{hashlib.sha256(tag.encode()).hexdigest()[:8]}.gguf"
    return WebFile(Name(HF_HOST, user, repo, tag), file=file, revision=revision)


def is_demo(text: str) -> bool:
    """Whether a user means the demo model, which comes from the package index. Raises RequestError for no name."""
    return parse_web_file(text) is None and parse_name(text).folded == parse_name("demo").folded


def is_path(text: str) -> bool:
    """Whether a user means a file: it ends in .gguf or starts like a path, and is no link or hub name."""
    if re.match(r"(https?://|hf:|hf\.co/|huggingface\.co/)", text, re.IGNORECASE):
        return False
    return (
        text.endswith(".gguf") or text.startswith(("/", "./", "../", "~")) or (os.sep in text and os.path.isfile(text))
    )


def as_path(text: str) -> Path:
    """The path that `text` means; `~` is a home folder. Raises RequestError for a user that is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise RequestError(f"{_shown(text)}: there is no such user; a path that begins with ~ is written ./~") from None


def _shown(text: str) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 100 else shown[:96] + "...'"
