"""/v1/completions with several prompts: OpenAI's four shapes, choices prompt by prompt, echo, bounds, streams."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import Live, live_scripted
from tests.support.scripted import EOS


def backwards(tokens: Any) -> int:
    """Says the prompt backwards: the text of a chat turn, or raw ids up to a `|`."""
    text = bytes(tokens)
    mark = b"\nassistant: " if b"assistant: " in text else b"|"
    prompt, _, said = text.partition(mark)
    answer = prompt.removeprefix(b"user: ")[::-1]
    return answer[len(said)] if len(said) < len(answer) else EOS


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live_scripted(backwards) as running:
        yield running


def post(server: Live, prompt: Any, **body: Any) -> Any:
    return server.client.post("/v1/completions", json={"model": "fake", "prompt": prompt, "temperature": 0, **body})


def ids(text: str) -> list[int]:
    return list(f"{text}|".encode())


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        ("abc", ["cba"]),
        (["abc", "de", "abc"], ["cba", "ed", "cba"]),
        (ids("abc"), ["cba"]),
        ([ids("abc"), ids("de")], ["cba", "ed"]),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("echo", [False, True])
def test_choices_come_prompt_by_prompt(server: Live, prompt: Any, answers: list[str], n: int, echo: bool) -> None:
    given = prompt if isinstance(prompt, list) and isinstance(prompt[0], (list, str)) else [prompt]
    texts = [one if isinstance(one, str) else bytes(one).decode() for one in given]
    wanted = [(text if echo else "") + answer for text, answer in zip(texts, answers, strict=True) for _ in range(n)]
    reply = post(server, prompt, n=n, echo=echo).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(wanted)))
    assert [choice["text"] for choice in reply["choices"]] == wanted
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
    raw = isinstance(given[0], list)
    sizes = [len(text) if raw else len(f"user: {text}\nassistant: ") for text in texts]
    assert reply["usage"]["prompt_tokens"] == sum(sizes)
    assert reply["usage"]["completion_tokens"] == n * sum(map(len, answers))
    options = {"include_usage": True}
    events = post(server, prompt, n=n, echo=echo, stream=True, stream_options=options).text.split("\n\n")[:-1]
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chunks[-1]["usage"][name] for name in counts] == [reply["usage"][name] for name in counts]
    streamed, reasons = [""] * len(wanted), [[] for _ in wanted]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
        reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert streamed == wanted and reasons == [["stop"]] * len(wanted)


def test_echo_without_an_answer(server: Live) -> None:
    (choice,) = post(server, "abc", echo=True, max_tokens=0).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")


@pytest.mark.parametrize(
    ("prompt", "body", "word"),
    [
        ([], {}, "prompt"),
        (["a"] * 129, {}, "128"),
        (["a"] * 65, {"n": 2}, "65 prompts times n = 2"),
        ([[97], []], {}, "empty"),
        (["a", 1], {}, "prompt"),
        ([["a"]], {}, "prompt"),
        ([[97], [70000]], {}, "token ids must lie between 0 and 511"),
        ([[97], [-1]], {}, "token ids"),
        ("a", {"echo": True, "logprobs": 1}, "echo"),
        ([97], {"suffix": "b"}, "suffix"),
        (["a", "b" * 1100], {}, "maximum context length is 1024 tokens. However, your prompt has 1118 tokens"),
        (5, {}, "prompt"),
    ],
)
def test_prompts_that_are_refused(server: Live, prompt: Any, body: dict[str, Any], word: str) -> None:
    reply = post(server, prompt, **body)
    assert reply.status_code == 400
    assert word in reply.json()["error"]["message"]
    assert not server.llm().engine.has_work


def test_a_client_that_leaves_frees_all_answers(server: Live) -> None:
    body = {"model": "fake", "prompt": ["x" * 400] * 8, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_bytes())
    deadline = time.monotonic() + 20
    while server.llm().on_engine(lambda: server.llm().engine.has_work):
        assert time.monotonic() < deadline
    assert post(server, "ab").json()["choices"][0]["text"] == "ba"
