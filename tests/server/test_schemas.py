"""The sixty schemas against the demo model at temperature 1.5, over HTTP, many at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edgellm.errors import GrammarError
from tests.server.model_store import live_store, own_home, store_model
from tests.server.schemas import SCHEMAS
from tests.support.real import real_model

pytestmark = pytest.mark.real


def test_every_reply_that_ends_is_valid_and_nearly_all_end(tmp_path_factory: pytest.TempPathFactory) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    with own_home(tmp_path_factory.mktemp("home")) as store:
        store_model(store, "demo", real_model("smollm2.gguf"))
        with live_store(store, "auto", ctx=1024) as server:

            def ask(number: int) -> dict[str, Any]:
                messages = [{"role": "user", "content": "Make something up, as JSON."}]
                options = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "seed": number, "num_predict": 400}
                body = {"model": "demo", "messages": messages, "format": SCHEMAS[number], "options": options}
                reply = server.client.post("/api/chat", json={**body, "stream": False}, timeout=300)
                assert reply.status_code == 200, (SCHEMAS[number], reply.text)
                return dict(reply.json())

            with ThreadPoolExecutor(32) as pool:
                replies = list(pool.map(ask, range(len(SCHEMAS))))
    ended = 0
    for schema, reply in zip(SCHEMAS, replies, strict=True):
        text = reply["message"]["content"]
        if reply["done_reason"] == "stop":
            ended += 1
            draft = jsonschema.Draft202012Validator
            draft(schema, format_checker=draft.FORMAT_CHECKER).validate(json.loads(text))
        else:
            assert reply["done_reason"] == "length" and reply["eval_count"] == 400
    assert ended >= 0.95 * len(SCHEMAS), f"{ended} of {len(SCHEMAS)} replies ended"


def test_all_of_them_compile() -> None:
    from edgellm.chat.grammar import GrammarCompiler
    from edgellm.loader import open_gguf
    from edgellm.tokenizer import from_metadata

    with open_gguf(real_model("smollm2.gguf")) as gguf:
        compiler = GrammarCompiler(from_metadata(gguf.metadata))
        for schema in SCHEMAS:
            try:
                compiler.json_schema(schema)
            except GrammarError as error:
                raise AssertionError(f"{schema}: {error}") from None
