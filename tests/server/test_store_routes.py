"""Bringing models in over HTTP: uploads, create, and pulls from a registry that this test plays."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm.errors import StoreError
from edgellm.hub import manifest as mf
from edgellm.hub.modelfile import parse_modelfile
from edgellm.hub.names import parse_name
from edgellm.hub.pull import remove_partials
from tests.server.live import Live
from tests.server.model_store import live_store, own_home, store_model
from tests.support.hubs import model_file, serve_registry
from tests.support.origin import Origin, Reply
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


@pytest.fixture
def origin() -> Iterator[Origin]:
    with Origin() as made:
        yield made


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


def test_an_upload_leaves_room_on_the_disk(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(server.state.catalog.store.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    for content in (b"y" * 1000, iter([b"y" * 1000])):  # with a length, and in chunks
        reply = server.client.post(f"/api/blobs/sha256:{'1' * 64}", content=content)
        assert reply.status_code == 500 and "no space: the upload needs" in reply.json()["error"]
    assert not list(server.state.catalog.store.partial.iterdir())


def test_an_upload_that_stalls_is_ended_and_leaves_nothing(tmp_path: Path) -> None:
    with own_home(tmp_path) as store, live_store(store, body_timeout=0.2) as running, running.connect() as sock:
        head = f"POST /api/blobs/sha256:{'0' * 64} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc"
        sock.sendall(head.encode())
        answer = b""
        while piece := sock.recv(4096):
            answer += piece
        assert b" 408 " in answer and b"no more of the request body came for 0.2 s" in answer
        assert not list(store.partial.iterdir())


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


def test_a_model_that_is_made_anew_answers_as_it_was_made_last(server: Live) -> None:
    ask = {"model": "anew", "prompt": "a", "stream": False, "options": {"num_predict": 1}}

    def prompt_size(**made: str) -> int:
        body = {"model": "anew", "from": "tiny", "stream": False, **made}
        assert server.client.post("/api/create", json=body).status_code == 200
        return int(server.client.post("/api/generate", json=ask).json()["prompt_eval_count"])

    short, long = prompt_size(system="a"), prompt_size(system="a" * 20)
    assert long == short + 19
    assert prompt_size(template="{{ messages[0].content }}") == 1


def test_a_parameter_that_is_null_is_not_stored(server: Live) -> None:
    body = {"model": "unset", "from": "tiny", "parameters": {"temperature": None, "top_k": 3}, "stream": False}
    assert server.client.post("/api/create", json=body).json() == {"status": "success"}
    shown = server.client.post("/api/show", json={"model": "unset"}).json()
    assert shown["parameters"].split() == ["top_k", "3"]
    assert parse_modelfile(shown["modelfile"]).params == {"top_k": 3}


def test_an_empty_template_is_none(server: Live) -> None:
    body = {"model": "plain", "from": "tiny", "template": "", "stream": False}
    assert server.client.post("/api/create", json=body).json() == {"status": "success"}
    counts = [
        server.client.post(
            "/api/chat",
            json={
                "model": model,
                "messages": [{"role": "user", "content": "x"}],
                "stream": False,
                "options": {"num_predict": 1},
            },
        ).json()["prompt_eval_count"]
        for model in ("tiny", "plain")
    ]
    assert counts[0] == counts[1] > 1


def test_ps_tells_a_model_whose_file_was_removed(server: Live, folder: Path) -> None:
    store = server.state.catalog.store
    store_model(store, "gone", tiny_gguf(folder / "gone.gguf", context_length=32))
    assert server.client.post("/api/generate", json={"model": "gone"}).status_code == 200
    store.remove(parse_name("gone"))
    reply = server.client.get("/api/ps")
    assert reply.status_code == 200 and "gone:latest" in [model["name"] for model in reply.json()["models"]]


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
        ({"model": "x", "from": "tiny", "messages": [{"role": "tool", "content": "x"}]}, "messages.0: the role"),
        ({"model": "x", "from": "tiny", "messages": [{"role": "banana", "content": "x"}]}, "messages.0: the role"),
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


def test_pull_of_a_name_that_the_registry_does_not_have(server: Live, origin: Origin) -> None:
    body = {"model": f"127.0.0.1:{origin.port}/library/nope", "insecure": True}
    first, last = lines(server.client.post("/api/pull", json=body))
    assert first == {"status": "pulling manifest"}
    assert last["error"].startswith("pull model manifest: file does not exist")
    reply = server.client.post("/api/pull", json={**body, "stream": False})
    assert reply.status_code == 404 and reply.json()["error"] == last["error"]


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (Reply(500, b"out of order"), "out of order"),
        (Reply(200, b"<html>Please log in"), "is not JSON"),
        (Reply(200, b'{"layers": [{"digest": "sha256:../x"}]}'), "digest"),
    ],
)
def test_pull_from_a_registry_that_fails(server: Live, origin: Origin, answer: Reply, part: str) -> None:
    origin.handle(lambda request: answer)
    body = {"model": f"127.0.0.1:{origin.port}/library/m", "insecure": True, "stream": False}
    reply = server.client.post("/api/pull", json=body)
    assert reply.status_code == 424 and reply.json()["error"].startswith("pull model manifest: ")
    assert part in reply.json()["error"]


def test_pull_brings_a_model(server: Live, origin: Origin, tmp_path: Path) -> None:
    serve_registry(origin, "library/m", [(mf.MODEL, tiny_gguf(tmp_path / "m.gguf", context_length=48))])
    name = f"127.0.0.1:{origin.port}/library/m"
    found = lines(server.client.post("/api/pull", json={"model": name, "insecure": True}))
    assert found[0] == {"status": "pulling manifest"} and found[-1] == {"status": "success"}
    assert f"{name}:latest" in [model["name"] for model in server.client.get("/api/tags").json()["models"]]


def test_a_client_that_leaves_a_pull_stops_it_without_a_traceback(
    server: Live, origin: Origin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (how,) = serve_registry(origin, "library/left", [(mf.MODEL, model_file(tmp_path / "left.gguf", 6 << 20))])
    how.rate = 1e6
    body = {"model": f"127.0.0.1:{origin.port}/library/left", "insecure": True}
    with server.client.stream("POST", "/api/pull", json=body) as reply:
        next(line for line in reply.iter_lines() if "completed" in line)
    store, deadline = server.state.catalog.store, time.monotonic() + 30
    while True:
        try:
            assert len(remove_partials(store, "library/left")) == 1
            break
        except StoreError:  # it is being pulled
            assert time.monotonic() < deadline
            time.sleep(0.05)
    gc.collect()
    assert server.client.get("/api/version").status_code == 200
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({}, 400, "model is required"),
        ({"model": "a b"}, 400, "not a model name"),
        ({"model": "../x"}, 400, "path"),
        ({"model": "http://example.com/u/m:t"}, 400, '"insecure": true'),
        ({"model": "glm:cloud"}, 404, "Ollama's servers"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_pull_refuses_before_it_asks_anyone(
    server: Live, body: dict[str, Any], status: int, part: str, stream: bool
) -> None:
    reply = server.client.post("/api/pull", json={**body, "stream": stream})
    assert reply.status_code == status and part in reply.json()["error"]
