"""Where models come from: Ollama's registry protocol, the Hugging Face hub's plain route, and bare URLs.

Each gives a `RemoteModel`: the name it will be stored under and its files, each of which can say where its bytes are.
Hosts can be moved: EDGELLM_REGISTRY (default registry), HF_ENDPOINT (hub); HF_TOKEN goes to the hub's origin alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urljoin, urlsplit

from edgellm.errors import ModelNotFound, PullError, RequestError, StoreError, UnsupportedModel
from edgellm.hub import manifest as mf
from edgellm.hub.choice import choose_files
from edgellm.hub.manifest import Layer, Manifest
from edgellm.hub.names import DEFAULT_HOST, Name, WebFile, is_path, parse_name, parse_web_file
from edgellm.hub.web import Answer, Location, Web, is_local, origin, shown

__all__ = ["NotThere", "RemoteFile", "RemoteModel", "check_source", "find_remote"]


class NotThere(PullError):
    """The source was asked and has no such model, or shows it to nobody without a right to it."""

    http_status = 404


@dataclass(frozen=True)
class RemoteFile:
    """A blob that can be fetched. Its layer's digest is empty where nobody tells it before the download."""

    layer: Layer
    locate: Callable[[], Location | Answer]
    etag: str = ""


@dataclass(frozen=True)
class RemoteModel:
    """A model somewhere else. `manifest`: as received, or None where we make one after the download."""

    name: Name
    files: tuple[RemoteFile, ...]
    source: str
    manifest: Manifest | None = None

    @property
    def model_files(self) -> list[RemoteFile]:
        """The GGUF files, first shard first."""
        return [file for file in self.files if file.layer.media_type == mf.MODEL]


def check_source(text: str, insecure: bool = False) -> None:
    """Raises what can be said about the name of a model to pull before any server is asked: RequestError for what is
    no name or not encrypted, ModelNotFound for Ollama's cloud models, which have no weights to bring."""
    if is_path(text):
        raise RequestError(f"{text} is a path: a model file runs where it lies (edgellm run {text})")
    file = parse_web_file(text)
    name = file.name if file else parse_name(text)
    if file is None and (name.tag.lower() == "cloud" or name.tag.lower().endswith("-cloud")):
        raise ModelNotFound(f"{name} runs on Ollama's servers only: there is nothing to pull")
    if name.insecure and not insecure and not (file and _is_loopback(name.host)):
        where = shown(file.url) if file else f"http://{name.host}"
        raise RequestError(f"{where} is not encrypted; add --insecure if you trust the network to it")


def find_remote(web: Web, text: str) -> RemoteModel:
    """Asks the source that `text` names what it has. Raises what `check_source` raises, PullError or ModelNotFound."""
    check_source(text, web.insecure)
    file = parse_web_file(text)
    if file is not None:
        return _from_hub(web, file.name, file) if not file.url else _from_url(web, file)
    name = parse_name(text)
    return _from_hub(web, name, None) if name.is_hugging_face else _Registry(web, name).model()


class _Registry:
    """The registry protocol of Ollama (and of any OCI registry that holds such manifests)."""

    def __init__(self, web: Web, name: Name):
        self.web, self.name = web, name
        scheme = "http" if web.insecure and (name.insecure or _is_loopback(name.host)) else "https"
        given = os.environ.get("EDGELLM_REGISTRY", "").rstrip("/") if name.host == DEFAULT_HOST else ""
        if given.startswith("http://") and not web.insecure:
            raise PullError("EDGELLM_REGISTRY is not encrypted (http); add --insecure if you trust the network to it")
        self.base = f"{given or f'{scheme}://{name.host}'}/v2/{name.namespace}/{name.model}"
        self._token = ""

    def model(self) -> RemoteModel:
        url = f"{self.base}/manifests/{self.name.tag}"
        answer = self._authorised(lambda headers: self.web.read(url, {**headers, "Accept": mf.MANIFEST_TYPE}))
        assert isinstance(answer, Answer)
        if answer.status == 404:
            raise NotThere(f"pull model manifest: file does not exist ({self.name} is not at {origin(url)[1]})")
        if answer.status != 200:
            raise PullError(f"pull model manifest: {answer.reason()}")
        try:
            manifest = Manifest.parse(answer.body, str(self.name))
        except StoreError as error:  # the registry's doing, or that of a page that stands before it
            raise PullError(f"pull model manifest: {error}") from None
        if not manifest.of_type(mf.MODEL):
            raise UnsupportedModel(f"{self.name} holds no GGUF file, so edgellm cannot run it; look for one on hf.co")
        files = tuple(RemoteFile(layer, self._locator(layer)) for layer in manifest.blobs)
        return RemoteModel(self.name, files, self.base, manifest)

    def _locator(self, layer: Layer) -> Callable[[], Location | Answer]:
        url = f"{self.base}/blobs/{layer.digest}"
        return lambda: self._authorised(lambda headers: self.web.locate(url, headers))

    def _authorised(self, ask: Callable[[dict[str, str]], Location | Answer]) -> Location | Answer:
        """Asks; after a 401 gets an anonymous token, once."""
        answer = ask(self._headers())
        if isinstance(answer, Answer) and answer.status == 401:
            self._token = self._get_token(answer)
            answer = ask(self._headers())
            if isinstance(answer, Answer) and answer.status == 401:
                raise NotThere(f"{self.name} is private or does not exist (unauthorized: access denied)")
        return answer

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _get_token(self, answer: Answer) -> str:
        told = answer.headers.get("www-authenticate", "")
        fields = dict(re.findall(r'(\w+)="([^"]*)"', told)) if told.lower().startswith("bearer ") else {}
        realm = urljoin(answer.url, fields.get("realm", ""))
        here, there = origin(self.base), origin(realm)
        if not fields.get("realm") or there[1] != here[1] or (there[0] != here[0] and there[0] != "https"):
            raise NotThere(f"{self.name} is private or does not exist (unauthorized: access denied)")
        query = [("service", fields.get("service", ""))] + [("scope", s) for s in fields.get("scope", "").split()]
        joined = "&" if "?" in realm else "?"
        reply = self.web.read(f"{realm}{joined}{urlencode([q for q in query if q[1]])}")
        data = reply.json() if reply.status == 200 else None
        token = data.get("token") or data.get("access_token") if isinstance(data, dict) else None
        if not isinstance(token, str) or not re.match(r"[\x21-\x7e]{1,16384}\Z", token):
            raise NotThere(f"{self.name} is private or does not exist (unauthorized: access denied)")
        return token


def _from_hub(web: Web, name: Name, file: WebFile | None) -> RemoteModel:
    if os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "TRUE", "YES", "ON"):
        raise PullError(f"HF_HUB_OFFLINE is set, so {name} is not fetched; unset it to pull")
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    token = _hub_token()
    if token and origin(endpoint)[0] == "http" and not web.insecure and not is_local(origin(endpoint)[1]):
        raise PullError(
            f"HF_ENDPOINT {shown(endpoint)} is not encrypted: HF_TOKEN is not sent there without --insecure"
        )
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    repo = f"{name.namespace}/{name.model}"
    revision = file.revision if file else "main"
    answer = web.read(f"{endpoint}/api/models/{repo}/revision/{revision}?blobs=true", headers)
    if answer.status != 200:
        raise _hub_error(answer, repo, endpoint, bool(token))
    listing = answer.json()
    siblings = listing.get("siblings") if isinstance(listing, dict) else None
    if not isinstance(siblings, list):
        raise PullError(f"{shown(answer.url)} gave no list of files; is HF_ENDPOINT right?")
    known = {s["rfilename"]: s for s in siblings if isinstance(s, dict) and isinstance(s.get("rfilename"), str)}
    commit = listing.get("sha")
    commit = commit if isinstance(commit, str) and re.match(r"[0-9a-f]{40}\Z", commit) else revision
    files = []
    for path in choose_files(list(known), file.file if file else name.tag, f"hf.co/{repo}"):
        url = f"{endpoint}/{repo}/resolve/{commit}/{quote(path)}"
        layer = _hub_layer(known[path], path, repo)
        locate = _hub_locator(web, url, headers, repo, endpoint, bool(token))
        files.append(RemoteFile(layer, locate))
    return RemoteModel(name, tuple(files), f"{endpoint}/{repo}@{commit}")


def _hub_locator(
    web: Web, url: str, headers: dict[str, str], repo: str, endpoint: str, has_token: bool
) -> Callable[[], Location | Answer]:
    def locate() -> Location | Answer:
        found = web.locate(url, headers)
        if isinstance(found, Answer) and found.status in (401, 403, 404) and origin(found.url) == origin(endpoint):
            raise _hub_error(found, repo, endpoint, has_token)
        return found

    return locate


def _hub_layer(entry: dict[str, Any], path: str, repo: str) -> Layer:
    lfs = entry.get("lfs")
    lfs = lfs if isinstance(lfs, dict) else {}
    digest, size = lfs.get("sha256") or lfs.get("oid") or "", lfs.get("size") or entry.get("size")
    digest = f"sha256:{digest}" if digest else ""
    if (digest and not mf.valid_digest(digest)) or isinstance(size, bool) or not isinstance(size, int):
        raise PullError(f"hf.co/{repo}: the listing has no sound size and digest for {ascii(path)[1:-1][:120]}")
    if not 0 < size < 1 << 50:
        raise PullError(f"hf.co/{repo}: the listing says {size} bytes for {ascii(path)[1:-1][:120]}")
    base = path.rpartition("/")[2]
    return Layer(mf.MODEL, digest, size, base if mf.safe_file_name(base) else "")


def _hub_error(answer: Answer, repo: str, endpoint: str, has_token: bool) -> PullError:
    """What the hub's error codes mean for a user."""
    code = answer.headers.get("x-error-code", "")
    page = f"{endpoint}/{repo}"
    if code == "GatedRepo":
        then = "then run this again" if has_token else "then set HF_TOKEN to a token of that account"
        return PullError(f"hf.co/{repo} is gated: open {page}, accept its terms with your account, {then}")
    if code == "RevisionNotFound":
        return NotThere(f"hf.co/{repo} has no such revision ({answer.reason()})")
    if code == "EntryNotFound":
        return NotThere(f"hf.co/{repo} has no such file ({answer.reason()})")
    if code == "RepoNotFound" or answer.status in (401, 404):
        rest = "HF_TOKEN has no access to it" if has_token else "it is private: then set HF_TOKEN"
        return NotThere(f"hf.co/{repo} does not exist, or {rest}")
    if answer.status == 429:
        return PullError(f"{origin(endpoint)[1]} limits requests ({answer.reason()}); wait, or set HF_TOKEN")
    return PullError(f"{origin(endpoint)[1]} answers {answer.reason()}")


def _hub_token() -> str:
    """HF_TOKEN, or what `hf auth login` stored."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(variable, "").strip():
            return _clean_token(os.environ[variable])
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    given = os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")
    try:
        return _clean_token(Path(os.path.expanduser(given)).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return ""


def _clean_token(text: str) -> str:
    token = text.strip().strip("\"'")
    if not re.match(r"[\x21-\x7e]{1,4096}\Z", token):
        raise PullError("the Hugging Face token has characters that no token has; check HF_TOKEN")
    return token


def _from_url(web: Web, file: WebFile) -> RemoteModel:
    found = web.locate(file.url)
    if isinstance(found, Answer):
        raise PullError(f"{shown(file.url)} answers {found.reason()}")
    if found.size is None or found.size == 0:
        raise PullError(f"{shown(file.url)} does not say how long the file is, so it cannot be fetched safely")
    base = urlsplit(file.url).path.rpartition("/")[2]
    layer = Layer(mf.MODEL, "", found.size, base if mf.safe_file_name(base) else "")
    return RemoteModel(file.name, (RemoteFile(layer, lambda: web.locate(file.url), found.etag),), shown(file.url))


def _is_loopback(host: str) -> bool:
    return bool(re.match(r"(localhost|127\.\d+\.\d+\.\d+)(:\d+)?\Z", host, re.IGNORECASE))
