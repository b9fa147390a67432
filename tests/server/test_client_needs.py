"""What client libraries read beside the text: found with the libraries, told by the vendors' documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from edgellm.errors import RequestError
from edgellm.server.openai_wire import allowed_tools
from tests.server.live import Live, fake_record, live_scripted
from tests.support.scripted import say

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    record = fake_record(params={"stop": ["own"]})
    with live_scripted(say("one, two, own, three"), record=record, llm={"ctx": 128}) as running:
        yield running


def post(server: Live, path: str, **body: Any) -> Any:
    return server.client.post(path, json={"model": "fake", "temperature": 0, **body})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stops", "reason", "found"),
    [
        (["never", ", two"], "stop_sequence", ", two"),
        (["never"], "end_turn", None),
        ([], "end_turn", None),
    ],
)
def test_anthropic_is_told_which_of_its_stop_sequences_ended_the_answer(
    server: Live, stops: list[str], reason: str, found: str | None, stream: bool
) -> None:
    reply = post(server, "/v1/messages", messages=HI, max_tokens=50, stop_sequences=stops, stream=stream)
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
        ending = next(event["delta"] for event in events if event["type"] == "message_delta")
    else:
        ending = reply.json()
    assert (ending["stop_reason"], ending["stop_sequence"]) == (reason, found)


def test_a_prompt_that_is_too_long_is_told_in_the_words_clients_look_for(server: Live) -> None:
    long = [{"role": "user", "content": "x" * 200}]
    error = post(server, "/v1/messages", messages=long, max_tokens=5).json()["error"]
    assert error["message"].startswith("prompt is too long: 218 tokens > 127 maximum")
    for path, body in (("/v1/chat/completions", {"messages": long}), ("/v1/responses", {"input": "x" * 200})):
        error = post(server, path, **body).json()["error"]
        assert error["message"].startswith(
            "This model's maximum context length is 128 tokens. However, your prompt has 218"
        )
        assert error["code"] == "context_length_exceeded"


def test_input_tokens_of_a_response_are_counted_as_the_response_counts_them(server: Live) -> None:
    ask = {"input": [{"role": "user", "content": "How many?"}], "instructions": "Count."}
    counted = post(server, "/v1/responses/input_tokens", **ask).json()
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": post(server, "/v1/responses", **ask).json()["usage"]["input_tokens"],
    }


def test_a_whole_number_may_be_written_with_a_point(server: Live) -> None:
    reply = post(server, "/v1/chat/completions", messages=HI, max_tokens=3.0, n=2.0, seed=1.0)
    assert [choice["message"]["content"] for choice in reply.json()["choices"]] == ["one"] * 2
    reply = post(server, "/v1/chat/completions", messages=HI, max_tokens=3.5)
    assert reply.status_code == 400 and "max_tokens" in reply.json()["error"]["message"]
    assert post(server, "/v1/messages", messages=HI, max_tokens=3.0).json()["usage"]["output_tokens"] == 3


def test_anthropic_clients_get_models_in_their_shape(server: Live) -> None:
    name, made = "fake:latest", "2023-11-14T22:13:20.000000Z"
    model = {"type": "model", "id": name, "display_name": name, "created_at": made}
    headers = {"anthropic-version": "2023-06-01"}
    page = server.client.get("/v1/models", headers=headers).json()
    assert page == {"data": [model], "has_more": False, "first_id": name, "last_id": name}
    one = server.client.get("/v1/models/fake", headers=headers).json()
    assert one == {**model, "id": "fake", "display_name": "fake"}
    assert server.client.get("/v1/models").json()["data"][0]["object"] == "model"


def test_ollama_replies_tell_a_load_duration_also_of_a_model_that_is_loaded(server: Live) -> None:
    for path, body in (("/api/chat", {"messages": HI}), ("/api/embed", {"input": "Hi"})):
        for _ in range(2):
            reply = post(server, path, stream=False, **body).json()
            assert reply["load_duration"] > 0, path
            assert reply["total_duration"] > reply["load_duration"]


def test_logprobs_of_a_response_are_there_where_they_are_asked_for(server: Live) -> None:
    ask = {"input": "Hi", "max_output_tokens": 3, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    entries = post(server, "/v1/responses", **ask).json()["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == list("one")
    assert all(set(entry) == {"token", "bytes", "logprob", "top_logprobs"} for entry in entries)
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 3
    lines = post(server, "/v1/responses", **ask, stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta] == entries
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries
    reply = post(server, "/v1/responses", **{**ask, "include": [], "metadata": {"a": "b"}}).json()
    assert reply["output"][0]["content"][0]["logprobs"] == [] and reply["metadata"] == {"a": "b"}


@pytest.mark.parametrize("nested", [False, True])
def test_allowed_tools_leave_the_others_out(nested: bool) -> None:
    tools = tuple({"type": "function", "function": {"name": name}} for name in ("a", "b"))
    listed = [{"type": "function", "function": {"name": "b"}} if nested else {"type": "function", "name": "b"}]
    inner = {"mode": "required", "tools": listed}
    choice = {"type": "allowed_tools", **({"allowed_tools": inner} if nested else inner)}
    assert allowed_tools(choice, tools) == ("required", tools[1:])
    with pytest.raises(RequestError, match="'b', which is not among the tools"):
        allowed_tools(choice, tools[:1])
    with pytest.raises(RequestError, match="list of tools"):
        allowed_tools({"type": "allowed_tools"}, tools)
    with pytest.raises(RequestError, match="None, which is not among the tools"):
        allowed_tools({"type": "allowed_tools", "tools": [{"function": "b"}]}, tools)


def test_a_document_of_plain_text_is_read(server: Live) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The sky is green."}
    block = {"type": "document", "source": source, "title": "Facts"}
    for content in ([block], [{"type": "text", "text": "Facts\nThe sky is green."}]):
        counted = post(server, "/v1/messages/count_tokens", messages=[{"role": "user", "content": content}])
        assert counted.json() == {"input_tokens": len("user: Facts\nThe sky is green.\nassistant: ")}
    block["source"] = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
    reply = post(server, "/v1/messages", messages=[{"role": "user", "content": [block]}], max_tokens=5)
    assert reply.status_code == 400 and "only plain text" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "function_call_output", "call_id": "c", "output": 5}, "input.1.output:"),
        ({"type": "function_call_output", "call_id": "c", "output": [1]}, "input.1.output.0:"),
        ({"type": "function_call_output", "call_id": 5, "output": "x"}, "input.1.call_id:"),
        ({"type": "function_call", "call_id": 5, "name": "f", "arguments": "{}"}, "input.1.call_id:"),
        ({"type": "function_call", "call_id": "c", "name": 5, "arguments": "{}"}, "input.1.name:"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": 5}, "input.1.arguments:"),
        ({"role": "user", "content": [{"type": "x"}]}, "input.1:"),
        ({"role": "banana", "content": "x"}, "input.1:"),
    ],
)
def test_responses_names_the_field_as_the_client_wrote_it(server: Live, item: dict[str, Any], field: str) -> None:
    """Not as the chat message that is made of it, and not counted from the instructions."""
    given = [{"role": "user", "content": "x"}, item]
    reply = post(server, "/v1/responses", input=given, instructions="Be brief.")
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(field)
