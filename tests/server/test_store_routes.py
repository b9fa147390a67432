"""Bringing models in over HTTP: uploads, create, and pulls from a registry that this test plays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import Live
from tests.server.model_store import live_store, own_home, store_model
from tests.support.tiny import CHATML, tiny_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with own_home(folder) as store:
        store_model(store, "tiny", tiny_gguf(folder / "tiny.gguf", context_length=64))
        with live_store(store) as running:
            yield running


def lines(reply: Any) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def test_blobs_are_checked_while_they_arrive(server: Live) -> None:
    data = b"x" * 100_000
    right = hashlib.sha256(data).hexdigest()
    url = f"/api/blobs/sha256:{right}"
    assert server.client.head(url).status_code == 404
    wrong = server.client.post(f"/api/blobs/sha256:{'0' * 64}", content=data)
    assert wrong.status_code == 400 and "digest mismatch" in wrong.json()["error"] and right in wrong.json()["error"]
    assert server.client.head(f"/api/blobs/sha256:{'0' * 64}").status_code == 404
    assert server.client.post(url, content=data).status_code == 201
    assert server.client.post(url, content=data).status_code == 200
    assert server.client.head(url.replace(":", "-", 1)).status_code == 200
    partial = list(server.state.catalog.store.partial.iterdir())
    assert not [path for path in partial if path.name.startswith("upload-")], "what was refused is left on disk"


@pytest.mark.parametrize(
    "digest", ["x", "sha256:", "sha256:" + "g" * 64, "..%2f..%2fetc%2fpasswd", "sha256:" + "0" * 63]
)
def test_what_is_no_digest_is_400(server: Live, digest: str) -> None:
    assert server.client.head(f"/api/blobs/{digest}").status_code in (400, 404)
    assert server.client.post(f"/api/blobs/{digest}", content=b"x").status_code in (400, 404, 405)


def test_create_from_a_stored_model(server: Live) -> None:
    body = {
        "model": "brief",
        "from": "tiny",
        "system": "Be brief.",
        "parameters": {"temperature": 0, "stop": ["z"], "num_predict": 3},
        "messages": [{"role": "user", "content": "Yo"}, {"role": "assistant", "content": "Hi"}],
        "license": ["Free.", "Really."],
        "template": CHATML,
    }
    assert lines(server.client.post("/api/create", json=body))[-1] == {"status": "success"}
    shown = server.client.post("/api/show", json={"model": "brief"}).json()
    assert shown["system"] == "Be brief." and shown["license"] == "Free.\nReally." and shown["template"] == CHATML
    assert shown["messages"] == body["messages"] and "num_predict" in shown["parameters"]
    ask = {"model": "brief", "messages": [{"role": "user", "content": "x"}], "stream": False}
    reply = server.client.post("/api/chat", json=ask).json()
    assert reply["eval_count"] <= 3


def test_create_from_an_uploaded_file(server: Live, folder: Path) -> None:
    data = tiny_gguf(folder / "other.gguf", seed=7, context_length=64).read_bytes()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    body = {"model": "other", "files": {"other.gguf": digest}, "stream": False}
    missing = server.client.post("/api/create", json=body)
    assert missing.status_code == 400 and "upload it" in missing.json()["error"]
    assert server.client.post(f"/api/blobs/{digest}", content=data).status_code == 201
    assert server.client.post("/api/create", json=body).json() == {"status": "success"}
    ask = {"model": "other", "prompt": "x", "options": {"num_predict": 2}, "stream": False}
    assert server.client.post("/api/generate", json=ask).json()["eval_count"] == 2


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"model": "x"}, "neither 'from' or 'files' was specified"),
        ({"from": "tiny"}, "model is required"),
        ({"model": "x", "from": "nope"}, "nope"),
        ({"model": "../x", "from": "tiny"}, "invalid model name"),
        ({"model": "x", "from": "tiny", "adapters": {"a": "b"}}, "adapters"),
        ({"model": "x", "from": "tiny", "quantize": "q4_K_M"}, "quantize"),
        ({"model": "x", "from": "tiny", "parameters": {"temperature": "hot"}}, "temperature"),
        ({"model": "x", "from": "tiny", "template": "{{ if .System }}{{ .System }}{{ end }}"}, "Go template"),
        ({"model": "x", "from": "tiny", "template": "{% if %}"}, "template"),
        ({"model": "x", "files": {"a.gguf": "sha256:../../x"}}, "not here"),
        ({"model": "x", "files": {"a.safetensors": f"sha256:{'0' * 64}"}}, ".gguf"),
    ],
)
def test_what_create_refuses(server: Live, body: dict[str, Any], part: str) -> None:
    reply = server.client.post("/api/create", json={**body, "stream": False})
    assert reply.status_code in (400, 404) and part.lower() in reply.json()["error"].lower()


@pytest.mark.parametrize("source", ["/etc/passwd", "./x.gguf", "~/x.gguf", "../../x.gguf", "lock", "manifests/x"])
def test_create_reads_no_path_that_a_client_names(server: Live, source: str) -> None:
    reply = server.client.post("/api/create", json={"model": "x", "from": source, "stream": False})
    assert reply.status_code in (400, 404) and "root:" not in reply.text


def test_pull_of_an_unknown_name(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgellm.errors import ModelNotFound, PullError
    from edgellm.hub import pull as hub_pull

    def missing(name: str, store: Any, options: Any, tell: Any, stop: Any) -> None:
        tell({"status": "pulling manifest"})
        raise ModelNotFound(f"{name} is not there")

    monkeypatch.setattr(hub_pull, "pull", missing)
    first, last = lines(server.client.post("/api/pull", json={"model": "nope"}))
    assert (first, last) == ({"status": "pulling manifest"}, {"error": "pull model manifest: file does not exist"})
    assert server.client.post("/api/pull", json={"model": "nope", "stream": False}).status_code == 404
    assert server.client.post("/api/pull", json={}).status_code == 400

    def broken(*_: Any) -> None:
        raise PullError("the registry answered 500")

    monkeypatch.setattr(hub_pull, "pull", broken)
    reply = server.client.post("/api/pull", json={"model": "x", "stream": False})
    assert (reply.status_code, reply.json()) == (424, {"error": "the registry answered 500"})
