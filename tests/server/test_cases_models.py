"""Cases B31 and B34 over HTTP, on tiny model files in a real store: probes, listings, embeddings."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.hub import manifest as mf
from tests.server.live import Live
from tests.server.model_store import live_store, own_home, store_model
from tests.support.tiny import tiny_gguf


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("home")
    with own_home(folder) as store:
        store_model(
            store,
            "tiny",
            tiny_gguf(folder / "tiny.gguf", context_length=64),
            params=(mf.PARAMS, json.dumps({"temperature": 0.5, "stop": ["a b", "</s>"]}).encode()),
            system=(mf.SYSTEM, b"Be brief."),
            license=(mf.LICENSE, b"Free."),
        )
        store_model(store, "user/gemma:q", tiny_gguf(folder / "gemma.gguf", "gemma3", context_length=64))
        with live_store(store) as running:
            yield running


def test_what_is_said_of_a_stored_model_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with own_home(tmp_path) as store:
        store_model(store, "bare", tiny_gguf(tmp_path / "bare.gguf", context_length=64, chat_template=None))
        with live_store(store) as running:
            body = {"model": "bare", "messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 1}}
            assert running.client.post("/api/chat", json=body).status_code == 200
    said = [record.getMessage() for record in caplog.records if "no chat template" in record.getMessage()]
    assert said == ["bare:latest has no chat template: the messages are its bare prompt, joined by empty lines"]


def test_b31_heads_and_probes(server: Live) -> None:
    for path in ("/", "/api/version", "/api/tags"):
        reply = server.client.head(path)
        assert (reply.status_code, reply.content) == (200, b"")
    reply = server.client.get("/")
    assert reply.text == "Ollama is running" and reply.headers["content-type"].startswith("text/plain")
    assert re.fullmatch(r"\d+\.\d+\.\d+", server.client.get("/api/version").json()["version"])
    assert server.client.get("/api/ps").status_code == 200


def test_b31_tags(server: Live) -> None:
    models = {model["name"]: model for model in server.client.get("/api/tags").json()["models"]}
    assert set(models) == {"tiny:latest", "user/gemma:q"}
    for name, model in models.items():
        assert model["model"] == name and model["size"] > 10_000
        assert datetime.fromisoformat(model["modified_at"]).tzinfo is not None
        assert re.fullmatch("[0-9a-f]{64}", model["digest"])
        details = model["details"]
        assert details["format"] == "gguf" and details["quantization_level"] == "F16"
        assert all(details[key] for key in ("family", "families", "parameter_size"))
        assert model["capabilities"] == ["completion"]
    assert models["user/gemma:q"]["details"]["family"] == "gemma3"


def test_b31_the_digest_is_that_of_the_manifests_bytes(server: Live) -> None:
    (tiny,) = (m for m in server.client.get("/api/tags").json()["models"] if m["name"] == "tiny:latest")
    file = next(Path(os.environ["EDGELLM_HOME"]).glob("models/manifests/*/library/tiny/latest"))
    assert tiny["digest"] == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("key", ["model", "name"])
@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "TINY"])
def test_b31_show(server: Live, key: str, name: str) -> None:
    value = server.client.post("/api/show", json={key: name}).json()
    info = value["model_info"]
    assert info["general.architecture"] == "llama" and info["llama.context_length"] == 64
    assert info["tokenizer.ggml.tokens"] == [] and info["general.parameter_count"] > 0
    assert "general.name" not in info and "tokenizer.chat_template" not in info
    assert "completion" in value["capabilities"] and "im_start" in value["template"]
    assert (value["system"], value["license"]) == ("Be brief.", "Free.")
    # As Ollama's clients read it: the name padded to 30, a space, the value; strings quoted; lists repeated.
    expected = [("temperature", "0.5"), ("stop", '"a b"'), ("stop", '"</s>"')]
    assert value["parameters"].split("\n") == [f"{option:<30} {text}" for option, text in expected]


def test_b31_show_verbose_holds_the_vocabulary(server: Live) -> None:
    value = server.client.post("/api/show", json={"model": "tiny", "verbose": True}).json()
    assert len(value["model_info"]["tokenizer.ggml.tokens"]) == 300


def test_b31_openai_models(server: Live) -> None:
    models = {model["id"]: model for model in server.client.get("/v1/models").json()["data"]}
    assert models["tiny:latest"]["owned_by"] == "library" and models["user/gemma:q"]["owned_by"] == "user"
    assert server.client.get("/v1/models/user%2Fgemma:q").json()["id"] == "user/gemma:q"
    assert server.client.get("/v1/models/nope").json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("POST", "/api/generate", {"model": "nope", "prompt": "x"}, 404, "model 'nope' not found"),
        ("POST", "/api/generate", {"prompt": "x"}, 404, "model '' not found"),
        ("POST", "/api/chat", {"model": "nope", "messages": []}, 404, "model 'nope' not found"),
        ("POST", "/api/chat", {"messages": []}, 400, "model is required"),
        ("POST", "/api/show", {"model": "nope"}, 404, "model 'nope:latest' not found"),
        ("POST", "/api/show", {}, 400, "model is required"),
        ("POST", "/api/embed", {"model": "nope", "input": "x"}, 404, 'model "nope" not found, try pulling it first'),
        (
            "POST",
            "/api/embeddings",
            {"model": "nope", "prompt": "x"},
            404,
            'model "nope" not found, try pulling it first',
        ),
        ("POST", "/api/embeddings", {"prompt": "x"}, 400, "model is required"),
        ("POST", "/api/copy", {"source": "nope", "destination": "x"}, 404, 'model "nope" not found'),
        ("DELETE", "/api/delete", {"model": "nope"}, 404, "model 'nope' not found"),
        ("POST", "/api/chat", {"model": "../../etc/passwd", "messages": []}, 400, "invalid model name"),
        ("POST", "/api/chat", {"model": "a/b/c/d/e", "messages": []}, 400, "invalid model name"),
        ("POST", "/api/chat", {"model": "x:", "messages": []}, 400, "invalid model name"),
        (
            "POST",
            "/api/chat",
            {"model": "gpt-oss:120b-cloud", "messages": []},
            404,
            "model 'gpt-oss:120b-cloud' not found",
        ),
        ("POST", "/api/push", {"model": "tiny"}, 501, None),
        (
            "POST",
            "/api/chat",
            {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "think": True},
            400,
            None,
        ),
    ],
)
def test_exact_errors(server: Live, method: str, path: str, body: Any, status: int, text: str | None) -> None:
    reply = server.client.request(method, path, json=body)
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/json; charset=utf-8"
    assert list(reply.json()) == ["error"] and text in (None, reply.json()["error"])


def test_tools_on_a_model_without_them_are_refused(server: Live) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    reply = server.client.post("/api/chat", json=body)
    assert reply.status_code == 400 and reply.json()["error"].endswith("does not support tools")


def test_a_copy_is_a_model_and_goes_alone(server: Live) -> None:
    assert server.client.post("/api/copy", json={"source": "tiny", "destination": "other"}).content == b""
    names = {model["name"] for model in server.client.get("/api/tags").json()["models"]}
    assert "other:latest" in names
    body = {"model": "other", "prompt": "x", "options": {"num_predict": 1}, "stream": False}
    assert server.client.post("/api/generate", json=body).status_code == 200
    reply = server.client.request("DELETE", "/api/delete", json={"model": "other"})
    assert (reply.status_code, reply.content) == (200, b"")
    assert {m["name"] for m in server.client.get("/api/ps").json()["models"]} <= {"tiny:latest", "user/gemma:q"}
    assert server.client.post("/api/show", json={"model": "tiny"}).status_code == 200


def embed(server: Live, value: Any, **more: Any) -> Any:
    return server.client.post("/api/embed", json={"model": "tiny", "input": value, **more})


def test_b34_vectors_have_length_one_in_the_order_of_the_texts(server: Live) -> None:
    texts = ["a", "", "b", *(f"text {i} " * (i % 9) for i in range(61))]
    together = np.array(embed(server, texts).json()["embeddings"])
    assert together.shape == (64, 64) and np.isfinite(together).all()
    assert np.linalg.norm(together, axis=1) == pytest.approx(1, abs=1e-3)
    for i in (0, 1, 2, 10, 63):
        alone = np.array(embed(server, texts[i]).json()["embeddings"][0])
        assert alone @ together[i] > 0.9999


def test_b34_too_long_is_cut_or_refused(server: Live) -> None:
    long = "abcdefgh" * 40
    expected = server.client.post("/api/embed", json={"model": "tiny", "input": long[:64]}).json()["embeddings"][0]
    for truncate in ({}, {"truncate": True}):
        reply = embed(server, long, **truncate).json()
        assert np.array(reply["embeddings"][0]) @ np.array(expected) > 0.9999
        assert reply["prompt_eval_count"] == 64
    refused = embed(server, long, truncate=False)
    assert refused.status_code == 400 and "exceeds the context length" in refused.json()["error"]


def test_b34_shapes_of_input(server: Live) -> None:
    assert embed(server, []).json()["embeddings"] == []
    for wrong in (5, [1, 2], {"a": 1}, ["a", None]):
        assert embed(server, wrong).status_code == 400
    cut = np.array(embed(server, "abc", dimensions=8).json()["embeddings"][0])
    whole = np.array(embed(server, "abc").json()["embeddings"][0])
    assert cut == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]), abs=1e-6)
    assert embed(server, "abc", dimensions=10**6).status_code == 400
    old = server.client.post("/api/embeddings", json={"model": "tiny", "prompt": "abc"}).json()["embedding"]
    assert old == pytest.approx(whole, abs=1e-6)
    assert server.client.post("/api/embeddings", json={"model": "tiny"}).json() == {"embedding": []}


def test_b34_openai_embeddings(server: Live) -> None:
    def ask(value: Any, **more: Any) -> Any:
        return server.client.post("/v1/embeddings", json={"model": "tiny", "input": value, **more})

    floats = [entry["embedding"] for entry in ask(["abc", "d"]).json()["data"]]
    packed = [entry["embedding"] for entry in ask(["abc", "d"], encoding_format="base64").json()["data"]]
    unpacked = [np.frombuffer(base64.b64decode(text), "<f4") for text in packed]
    assert np.array_equal(np.array(floats, np.float32), np.array(unpacked))
    ids = [3 + byte for byte in b"abc"]
    for value in (ids, [ids]):
        assert ask(value).json()["data"][0]["embedding"] == pytest.approx(floats[0], abs=1e-6)
    usage = ask("abc").json()["usage"]
    assert usage == {"prompt_tokens": 3, "total_tokens": 3}
    for wrong in ({"value": []}, {"value": None}, {"value": [[]]}, {"value": [10**6]}, {"value": [1.5]}):
        assert ask(**wrong).status_code == 400
    assert ask("a", encoding_format="int8").status_code == 400
