"""Constrained output over HTTP: JSON mode, schemas, regex and grammars, forced calls, and refusals in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.server.live import Live, live_scripted
from tests.support.scripted import EOS, VOCAB

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def blanks_first(tokens: Any) -> np.ndarray:
    """Space, newline and tab before all else, the closing brace last: the model that never ends its JSON (B19)."""
    rng = np.random.default_rng(len(tokens))
    row = rng.standard_normal(VOCAB).astype(np.float32)
    row[[ord(" "), ord("\n"), ord("\t")]] = 30, 29, 28
    row[ord("}")], row[EOS] = -20, -21
    return row


def object_then_newlines(tokens: Any) -> np.ndarray:
    said = bytes(t for t in tokens if t < 256).rpartition(b"assistant: ")[2]
    row = np.zeros(VOCAB, np.float32)
    row[b'{"a":1}\n\n\n\n'[min(len(said), 10)]] = 30
    return row


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live_scripted(blanks_first, llm={"ctx": 2048}) as running:
        yield running


def chat(server: Live, **body: Any) -> Any:
    return server.client.post("/api/chat", json={"model": "fake", "messages": HI, "stream": False, **body})


def test_b19_after_the_value_nothing_but_the_end_may_come() -> None:
    with live_scripted(object_then_newlines) as server:
        reply = chat(server, format="json", options={"num_predict": 200}).json()
        assert (reply["message"]["content"], reply["done_reason"]) == ('{"a":1}', "stop")


def test_b19_blanks_are_bounded_and_a_cut_reply_says_so(server: Live) -> None:
    reply = chat(server, format="json", options={"num_predict": 200, "temperature": 0}).json()
    text = reply["message"]["content"]
    assert reply["done_reason"] == "length" and reply["eval_count"] == 200
    runs = "".join(c if c.isspace() else "x" for c in text).split("x")
    assert max(len(run) for run in runs) <= 24 and len(text.split()) > 1


@pytest.mark.parametrize("path", ["ollama", "openai", "responses", "anthropic"])
def test_a_schema_holds_in_every_dialect(server: Live, path: str) -> None:
    if path == "ollama":
        text = chat(server, format=SCHEMA).json()["message"]["content"]
    elif path == "openai":
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
        body: Any = {"model": "fake", "messages": HI, "response_format": wanted}
        text = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    elif path == "responses":
        body = {
            "model": "fake",
            "input": "Hi",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        }
        text = server.client.post("/v1/responses", json=body).json()["output"][0]["content"][0]["text"]
    else:
        wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
        body = {"model": "fake", "messages": HI, "max_tokens": 500, "output_config": wanted}
        text = server.client.post("/v1/messages", json=body).json()["content"][0]["text"]
    value = json.loads(text)
    assert set(value) == {"name", "n"} and len(value["name"]) <= 5 and 0 <= value["n"] <= 9


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"type": "regex", "regex": "[0-9]{3}-[a-c]{2}"}, r"[0-9]{3}-[a-c]{2}"),
        ({"type": "lark", "lark": 'start: "yes" | "no"'}, r"yes|no"),
        ({"type": "gbnf", "gbnf": 'root ::= "left" | "right"'}, r"left|right"),
    ],
)
def test_regex_and_grammars(server: Live, wanted: dict[str, str], pattern: str) -> None:
    import re

    body = {"model": "fake", "messages": HI, "response_format": wanted}
    choice = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert re.fullmatch(pattern, choice["message"]["content"]) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"response_format": {"type": "regex", "regex": "("}}, "pattern"),
        ({"response_format": {"type": "gbnf", "gbnf": "root ::= ("}}, "grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "schema"),
        ({"response_format": {"type": "json_schema"}}, "schema"),
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/x"}}}}, "schema"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_compile_is_400_with_the_reason(server: Live, body: Any, part: str, stream: bool) -> None:
    reply = server.client.post("/v1/chat/completions", json={"model": "fake", "messages": HI, "stream": stream, **body})
    assert reply.status_code == 400 and part in reply.json()["error"]["message"]


@pytest.mark.parametrize("value", ["xml", 5, ["json"], True])
def test_format_is_json_or_a_schema(server: Live, value: Any) -> None:
    reply = chat(server, format=value)
    assert reply.status_code == 400 and "format" in reply.json()["error"]


@pytest.mark.parametrize("value", [None, ""])
def test_no_format_is_free_text(server: Live, value: Any) -> None:
    assert (
        chat(server, format=value, options={"num_predict": 3, "temperature": 0}).json()["message"]["content"] == "   "
    )
