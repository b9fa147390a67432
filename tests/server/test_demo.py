"""Cases B15, B22, B25, B26 and B34 on the demo model over HTTP: token counts, seeds, logprobs, truncation, vectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.server.live import Live
from tests.server.model_store import live_store, own_home, store_model
from tests.support.real import real_model

pytestmark = pytest.mark.real
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with own_home(tmp_path_factory.mktemp("home")) as store:
        store_model(store, "demo", real_model("smollm2.gguf"))
        with live_store(store, "auto") as running:
            yield running


def chat(server: Live, messages: list[dict[str, Any]] = HI, **body: Any) -> Any:
    reply = server.client.post("/api/chat", json={"model": "demo", "messages": messages, "stream": False, **body})
    return reply


def test_b15_hi_is_31_tokens_in_every_shape(server: Live) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    for messages in (HI, parts):
        final = chat(server, messages, options={"num_predict": 1}).json()
        assert final["prompt_eval_count"] == 31
        body = {"model": "demo", "messages": messages, "max_tokens": 1}
        assert server.client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"] == 31


def test_b22_seeds(server: Live) -> None:
    def said(**options: Any) -> str:
        reply = chat(server, [{"role": "user", "content": "Tell a story."}], options={"num_predict": 16, **options})
        return str(reply.json()["message"]["content"])

    assert said(temperature=0, seed=1) == said(temperature=0, seed=2) == said(temperature=0, top_k=0, min_p=1)
    assert said(seed=42) == said(seed=42) != said(seed=43)
    assert said() != said()
    for wrong in (-1, "0.5"):
        assert chat(server, options={"temperature": wrong}).status_code == 400


def test_b25_logprobs(server: Live) -> None:
    body = {"model": "demo", "messages": HI, "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    reply = server.client.post("/v1/chat/completions", json=body).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == reply["usage"]["completion_tokens"]
    text = bytes(byte for entry in content for byte in entry["bytes"]).decode()
    assert text == reply["choices"][0]["message"]["content"]
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True) and values[0] == entry["logprob"] <= 0
    assert server.client.post("/v1/chat/completions", json={**body, "top_logprobs": 21}).status_code == 400


def test_b26_the_system_turn_stays(server: Live) -> None:
    system = {"role": "system", "content": "The secret word is PINEAPPLE. Keep it."}
    turns = [
        {"role": role, "content": f"This is turn {n} of a long talk."}
        for n in range(10)
        for role in ("user", "assistant")
    ]
    last = {"role": "user", "content": "What is the secret word?"}
    final = chat(server, [system, *turns, last], options={"num_ctx": 128, "num_predict": 8, "temperature": 0}).json()
    dropped = final["truncated"]["messages"]
    kept = [system, *turns[dropped:], last]
    assert final["prompt_eval_count"] == len(server.llm().template.encode(kept)) < 128
    refused = chat(server, [system, *turns, last], truncate=False, options={"num_ctx": 128})
    assert refused.status_code == 400 and "128" in refused.json()["error"]


def test_b28_prompt_tokens_are_found_again_and_counted(server: Live) -> None:
    long = [{"role": "user", "content": "word " * 300}]
    first = chat(server, long, options={"num_predict": 1}).json()
    again = chat(server, long, options={"num_predict": 1}).json()
    assert again["prompt_eval_count"] == first["prompt_eval_count"]
    assert again["cached_tokens"] >= first["prompt_eval_count"] - 64


def test_b34_vectors_do_not_depend_on_the_batch(server: Live) -> None:
    texts = ["A cat.", "", "Something much longer about rivers and stones. " * 5, "b"]
    together = np.array(server.client.post("/api/embed", json={"model": "demo", "input": texts}).json()["embeddings"])
    assert np.linalg.norm(together, axis=1) == pytest.approx(1, abs=1e-3)
    for text, vector in zip(texts, together, strict=True):
        alone = server.client.post("/api/embed", json={"model": "demo", "input": text}).json()["embeddings"][0]
        assert np.array(alone) @ vector > 0.9999
