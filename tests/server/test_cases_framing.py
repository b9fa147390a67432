"""Cases B14 to B16 and B21 over HTTP: characters, content shapes, OpenAI's stream, loading by an empty request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import Live, live_scripted
from tests.support.scripted import EOS, Script

LLAMA, ASTRONAUT = "\U0001f999", "\U0001f469\u200d\U0001f680"
ANSWER = f'a{LLAMA}b\n"c"\u2028{ASTRONAUT}d'
HI = [{"role": "user", "content": "Hi"}]


def by_count(*answer: bytes) -> Script:
    """Says the bytes in turn, whatever they are, by counting what stands behind the prompt's last newline and space."""
    data = b"".join(answer)

    def script(tokens: Any) -> int:
        said = len(tokens) - (bytes(t for t in tokens if t < 256).index(b"assistant: ") + len(b"assistant: "))
        return data[said] if said < len(data) else EOS

    return script


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live_scripted(by_count(ANSWER.encode())) as running:
        yield running


@pytest.fixture(scope="module")
def hello() -> Iterator[Live]:
    with live_scripted("abc") as running:
        yield running


def chat(server: Live, **body: Any) -> Any:
    return server.client.post("/api/chat", json={"model": "fake", "messages": HI, **body})


def lines(reply: Any) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.content.decode().split("\n")[:-1]]


def events(reply: Any) -> list[Any]:
    """Data of server-sent events; the separators must be exact."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    frames = reply.content.decode().split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


def test_b14_characters_arrive_whole_and_a_stream_says_what_the_whole_reply_says(server: Live) -> None:
    whole = chat(server, stream=False)
    assert whole.headers["content-type"].startswith("application/json")
    pieces = [line["message"]["content"] for line in lines(chat(server))]
    assert "".join(pieces) == whole.json()["message"]["content"] == ANSWER
    assert sum(LLAMA in piece for piece in pieces) == 1 and not any("\ufffd" in piece for piece in pieces)


def test_b14_a_reader_of_single_bytes_gets_valid_lines(server: Live) -> None:
    body = json.dumps({"model": "fake", "messages": HI}).encode()
    head = f"POST /api/chat HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    got = b""
    with server.connect() as sock:
        sock.sendall(head + body)
        while piece := sock.recv(1):
            got += piece
    found = [json.loads(line) for line in got.partition(b"\r\n\r\n")[2].split(b"\n") if line]
    assert "".join(line["message"]["content"] for line in found) == ANSWER


@pytest.mark.parametrize("streams", [False, True])
def test_b14_a_character_cut_by_the_limit_is_one_replacement_in_both_shapes(streams: bool) -> None:
    with live_scripted(by_count(LLAMA.encode())) as server:
        reply = chat(server, stream=streams, options={"num_predict": 2})
        text = "".join(x["message"]["content"] for x in (lines(reply) if streams else [reply.json()]))
        assert text in ("", "\ufffd")
    with live_scripted(by_count(LLAMA.encode()[:2], b"Hello")) as server:
        reply = chat(server, stream=streams)
        text = "".join(x["message"]["content"] for x in (lines(reply) if streams else [reply.json()]))
        assert text == "\ufffdHello"


def test_b14_four_streams_at_once_say_the_same(server: Live) -> None:
    reply = server.client.post("/v1/chat/completions", json={"model": "fake", "messages": HI, "stream": True, "n": 4})
    texts = ["", "", "", ""]
    for event in events(reply)[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["delta"].get("content", "")
    assert texts == [ANSWER] * 4


def prompt_of(server: Live, path: str, **body: Any) -> int:
    reply = server.client.post(path, json={"model": "fake", "stream": False, **body})
    assert reply.status_code == 200, reply.text
    value = reply.json()
    return int(value["usage"]["prompt_tokens"] if path.startswith("/v1") else value["prompt_eval_count"])


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
def test_b15_one_text_part_is_the_plain_string_and_several_are_joined_by_a_newline(hello: Live, path: str) -> None:
    def count(content: Any) -> int:
        return prompt_of(hello, path, messages=[{"role": "user", "content": content}])

    assert count("Hi") == count([{"type": "text", "text": "Hi"}])
    assert count("Hi\nyou") == count([{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}])


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
def test_b15_null_content_beside_tool_calls_is_empty(hello: Live, path: str) -> None:
    arguments: Any = {} if path == "/api/chat" else "{}"
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    def count(content: Any) -> int:
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        result = {"role": "tool", "content": "42", "tool_call_id": "call_1"}
        return prompt_of(hello, path, messages=[*HI, turn, result])

    assert count(None) == count("")


def test_b15_null_without_calls_is_refused_on_v1_only(hello: Live) -> None:
    messages = [*HI, {"role": "assistant", "content": None}]
    body = {"model": "fake", "messages": messages}
    assert hello.client.post("/v1/chat/completions", json=body).status_code == 400
    assert chat(hello, messages=messages).status_code == 200


@pytest.mark.parametrize("images", [["not base64"], ["data:image/png;base64,AAAA"], [None], [5]])
def test_b15_images_to_a_text_model_are_refused_in_words(hello: Live, images: list[Any]) -> None:
    reply = chat(hello, messages=[{"role": "user", "content": "What is it?", "images": images}])
    assert reply.status_code == 400 and "image" in reply.json()["error"]
    reply = hello.client.post("/api/generate", json={"model": "fake", "prompt": "x", "images": images})
    assert reply.status_code == 400 and "image" in reply.json()["error"]


def test_b15_no_images_are_fine(hello: Live) -> None:
    assert chat(hello, messages=[{"role": "user", "content": "Hi", "images": []}]).status_code == 200


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": "http://example.org/x.png"},
        {"type": "input_audio", "input_audio": {}},
        {"type": "text"},
        {"type": "text", "text": 5},
        {},
    ],
)
def test_b15_parts_that_are_no_text_are_refused(hello: Live, part: dict[str, Any]) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": [part]}]}
    reply = hello.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(("limit", "text", "reason"), [(None, "abc", "stop"), (2, "ab", "length")])
def test_b16_the_stream_of_chat_completions(
    hello: Live, usage: bool, limit: int | None, text: str, reason: str
) -> None:
    body: dict[str, Any] = {"model": "fake", "messages": HI, "stream": True}
    if limit:
        body["max_tokens"] = limit
    if usage:
        body["stream_options"] = {"include_usage": True}
    *chunks, done = events(hello.client.post("/v1/chat/completions", json=body))
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    last_usage = chunks.pop() if usage else None
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reason]
    assert choices[-1]["delta"] == {}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == text
    if last_usage is not None:
        counts = last_usage["usage"]
        assert last_usage["choices"] == []
        assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
        assert counts["completion_tokens"] == len(text)


def test_b16_an_empty_answer_still_has_a_role_and_an_end() -> None:
    with live_scripted(lambda tokens: EOS) as server:
        body = {"model": "fake", "messages": HI, "stream": True}
        first, last, done = events(server.client.post("/v1/chat/completions", json=body))
        assert first["choices"][0]["delta"]["role"] == "assistant"
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"], done) == ({}, "stop", "[DONE]")


@pytest.mark.parametrize("stream", [True, False, None])
@pytest.mark.parametrize(
    ("path", "empty"),
    [
        ("/api/generate", {}),
        ("/api/generate", {"prompt": ""}),
        ("/api/generate", {"messages": HI}),
        ("/api/chat", {}),
        ("/api/chat", {"messages": []}),
    ],
)
def test_b21_empty_requests_load_and_unload(hello: Live, path: str, empty: dict[str, Any], stream: Any) -> None:
    def ask(**more: Any) -> dict[str, Any]:
        reply = hello.client.post(path, json={"model": "fake", "stream": stream, **empty, **more})
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("application/json")
        return dict(reply.json())

    loaded = ask()
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    said = loaded["message"]["content"] if path == "/api/chat" else loaded["response"]
    assert said == ""
    assert [model["name"] for model in hello.client.get("/api/ps").json()["models"]] == ["fake:latest"]
    assert ask(keep_alive=0)["done_reason"] == "unload"
    assert hello.client.get("/api/ps").json() == {"models": []}
    assert ask(keep_alive="0s")["done_reason"] == "unload"


def test_b21_an_empty_chat_on_v1_is_refused(hello: Live) -> None:
    reply = hello.client.post("/v1/chat/completions", json={"model": "fake", "messages": []})
    assert reply.status_code == 400
