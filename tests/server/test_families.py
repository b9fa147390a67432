"""Tools, reasoning and fill-in-the-middle in the families' own formats, from file to wire: small real GGUF files whose
weights force the reply, with Qwen, Llama 3, Mistral, Gemma and harmony templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgellm.server.forced_calls import calls_schema
from edgellm.server.hub_catalog import HubCatalog
from edgellm.server.loading import Loader
from edgellm.server.settings import ServerSettings
from tests.server.live import Live, live
from tests.server.model_store import BUDGET, own_home
from tests.support.forced import forced_gguf

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Tells it.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
    for name in ("get_time", "get_weather")
]
ARGUMENTS = {"city": "Zürich", "n": 3}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
IM = ("<|im_start|>", "<|im_end|>")
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
GEMMA = ("<start_of_turn>", "<end_of_turn>")
MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
HARMONY_TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    "{# <|channel|>analysis <|channel|>final reasoning_effort #}"
)
OPENING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A forced reply and what it must come to. `tools`: whether the request brings them."""

    template: str
    controls: tuple[str, ...]
    ends: str
    reply: str
    content: str = ""
    thinking: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    tools: bool = True
    size: int = 3


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


BROKEN = '<tool_call>\n{"name": "get_time", \n</tool_call>'
CALL = f'<tool_call>\n{{"name": "get_time", "arguments": {JSON}}}\n</tool_call>'
EMPTY = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
ONE = (("get_time", ARGUMENTS),)
FAMILIES = {
    "qwen-one-call": Family("chatml", IM, IM[1], CALL, calls=ONE),
    "qwen-text-and-two-calls": Family(
        "chatml", IM, IM[1], f"Let me see.\n{CALL}\n{EMPTY}", "Let me see.", calls=(*ONE, ("get_weather", {}))
    ),
    "qwen-marks-are-control-tokens": Family("chatml", (*IM, "<tool_call>", "</tool_call>"), IM[1], CALL, calls=ONE),
    "qwen-thought-and-call": Family(
        "chatml", (*IM, "<think>", "</think>"), IM[1], f"<think>\na > b\n</think>\n\n{CALL}", "", "a > b", ONE
    ),
    "qwen-thought-and-answer": Family(
        "chatml", IM, IM[1], "<think>a > b \U0001f999</think>\n\nX is it.", "X is it.", "a > b \U0001f999", tools=False
    ),
    "qwen-malformed-call": Family("chatml", IM, IM[1], BROKEN, BROKEN),
    "qwen-call-without-tools": Family("chatml", IM, IM[1], CALL, CALL, tools=False),
    "template-opens-the-thought": Family(
        OPENING_TEMPLATE, IM, IM[1], "hm\n</think>\n\nYes.", "Yes.", "hm", tools=False
    ),
    "llama3-bare-json": Family("llama3", LLAMA, LLAMA[2], f'{{"name": "get_time", "parameters": {JSON}}}', calls=ONE),
    "llama3-python-tag": Family(
        "llama3", LLAMA, LLAMA[2], f'<|python_tag|>{{"name": "get_time", "parameters": {JSON}}}', calls=ONE
    ),
    "llama3-plain-text": Family("llama3", LLAMA, LLAMA[2], "It is {late}, {really}.", "It is {late}, {really}."),
    "mistral-list": Family(
        "mistral", MISTRAL, "</s>", f'[TOOL_CALLS][{{"name": "get_time", "arguments": {JSON}}}]', calls=ONE
    ),
    "mistral-two-calls": Family(
        "mistral",
        MISTRAL,
        "</s>",
        f'[TOOL_CALLS][{{"name": "get_time", "arguments": {JSON}}}, {{"name": "get_weather", "arguments": {{}}}}]',
        calls=(*ONE, ("get_weather", {})),
    ),
    "gemma-plain": Family("gemma", GEMMA, GEMMA[1], "Hi <b> & </b>!", "Hi <b> & </b>!", tools=False),
    "harmony-thought-and-answer": Family(
        HARMONY_TEMPLATE,
        MARKS,
        "<|return|>",
        "<|channel|>analysis<|message|>a > b<|end|><|start|>assistant<|channel|>final<|message|>X",
        "X",
        "a > b",
        tools=False,
    ),
    "harmony-call": Family(
        HARMONY_TEMPLATE,
        MARKS,
        "<|call|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_time "
        f"<|constrain|>json<|message|>{JSON}",
        "",
        "hm",
        ONE,
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("home")
    with own_home(folder) as store:
        catalog = HubCatalog(store)
        for name, family in FAMILIES.items():
            source = family.template if "{" in family.template else template(family.template)
            kwargs = {"tools": TOOLS} if family.tools else {}
            file = forced_gguf(
                folder / f"{name}.gguf",
                family.reply,
                source,
                controls=(*family.controls, family.ends),
                ends=family.ends,
                size=family.size,
                kwargs=kwargs,
            )
            catalog.add_file(file)
        settings = ServerSettings(backend="reference", max_loaded=len(FAMILIES))
        with live(catalog, Loader(settings, BUDGET), BUDGET, max_loaded=len(FAMILIES)) as running:
            yield running


def body(name: str, **more: Any) -> dict[str, Any]:
    tools = {"tools": TOOLS} if FAMILIES[name].tools else {}
    return {"model": name, "messages": [{"role": "user", "content": "What time is it?"}], **tools, **more}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_b17_b18_ollama(server: Live, name: str, stream: bool) -> None:
    family = FAMILIES[name]
    reply = server.client.post("/api/chat", json=body(name, stream=stream, options={"temperature": 0.8, "seed": 1}))
    assert reply.status_code == 200, reply.text
    parts = [json.loads(line) for line in reply.text.splitlines()]
    messages = [part["message"] for part in parts]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert "".join(message["content"] for message in messages) == family.content
    assert "".join(message.get("thinking", "") for message in messages) == family.thinking
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == list(family.calls)
    assert [call["function"]["index"] for call in calls] == list(range(len(calls)))
    assert parts[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("name", FAMILIES)
def test_b17_b18_openai(server: Live, name: str) -> None:
    family = FAMILIES[name]
    whole = server.client.post("/v1/chat/completions", json=body(name)).json()["choices"][0]
    calls = whole["message"].get("tool_calls", [])
    assert (whole["message"]["content"] or "", whole["message"].get("reasoning", "")) == (
        family.content,
        family.thinking,
    )
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == list(
        family.calls
    )
    assert len({call["id"] for call in calls} - {""}) == len(calls)
    assert all(call["type"] == "function" for call in calls)
    assert whole["finish_reason"] == ("tool_calls" if calls else "stop")
    events = server.client.post("/v1/chat/completions", json=body(name, stream=True)).text.split("\n\n")[:-2]
    choices = [json.loads(event[6:])["choices"][0] for event in events]
    only_calls = bool(calls) and not (family.content or family.thinking)
    assert choices[0]["delta"]["content"] == (None if only_calls else "")
    streamed = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [(call["index"], call["function"]) for call in streamed] == [
        (index, call["function"]) for index, call in enumerate(calls)
    ]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == family.content
    assert choices[-1]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("name", ["qwen-thought-and-call", "qwen-text-and-two-calls", "harmony-call"])
def test_b17_anthropic_and_responses(server: Live, name: str) -> None:
    family = FAMILIES[name]
    functions = [tool["function"] for tool in TOOLS]
    tools = [{"name": f["name"], "description": "", "input_schema": f["parameters"]} for f in functions]
    ask = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 500, "tools": tools}
    reply = server.client.post("/v1/messages", json={**ask, "thinking": {"type": "adaptive"}}).json()
    used = [(block["name"], block["input"]) for block in reply["content"] if block["type"] == "tool_use"]
    assert used == list(family.calls) and reply["stop_reason"] == "tool_use"
    flat = [{"type": "function", **function} for function in functions]
    items = server.client.post("/v1/responses", json={"model": name, "input": "Hi", "tools": flat}).json()["output"]
    called = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
    assert called == list(family.calls)


def test_b18_a_thought_cut_by_the_limit_is_all_thought(server: Live) -> None:
    ask = body("qwen-thought-and-answer", stream=False, options={"num_predict": 4})
    reply = server.client.post("/api/chat", json=ask).json()
    assert reply["message"]["content"] == "" and "a > b \U0001f999".startswith(reply["message"]["thinking"])
    assert reply["done_reason"] == "length"


def test_b17_a_call_cut_by_the_limit_is_told_as_cut(server: Live) -> None:
    reply = server.client.post("/v1/chat/completions", json=body("qwen-one-call", max_tokens=10)).json()["choices"][0]
    assert reply["finish_reason"] == "length" and "tool_calls" not in reply["message"]
    assert CALL.startswith(reply["message"]["content"]) and reply["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_has_an_object_for_arguments(server: Live, stream: bool) -> None:
    def tool(kind: Any) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]

    ask = body("qwen-one-call", tool_choice="required", stream=stream, tools=tool("array"))
    reply = server.client.post("/v1/chat/completions", json=ask)
    assert reply.status_code == 400 and "'f' must be of type object, not 'array'" in reply.json()["error"]["message"]
    for kind in ("object", ["object", "null"]):
        assert calls_schema(tool(kind), "required")["properties"]["arguments"] == {"type": "object"}


@pytest.mark.parametrize("think", [None, True, False, "low"])
def test_b18_thoughts_are_kept_apart_whatever_was_asked(server: Live, think: Any) -> None:
    reply = server.client.post(
        "/api/chat", json=body("qwen-marks-are-control-tokens", stream=False, think=think)
    ).json()
    assert len(reply["message"]["tool_calls"]) == 1
    text = "<think>" + reply["message"].get("thinking", "") + reply["message"]["content"]
    assert "tool_call" not in text


def test_thinking_on_a_model_without_it_is_refused(server: Live) -> None:
    reply = server.client.post("/api/chat", json=body("gemma-plain", think=True))
    assert (reply.status_code, reply.json()["error"]) == (400, '"gemma-plain" does not support thinking')
    assert server.client.post("/api/chat", json=body("gemma-plain", think=False)).status_code == 200


def test_what_agents_always_send_does_not_stop_a_model_without_it(server: Live) -> None:
    ask = {"model": "gemma-plain", "max_tokens": 500, "messages": [{"role": "user", "content": "Hi"}]}
    search = {"type": "web_search_20250305", "name": "web_search"}
    reply = server.client.post("/v1/messages", json={**ask, "thinking": {"type": "adaptive"}, "tools": [search]})
    assert reply.status_code == 200 and reply.json()["content"][0]["text"] == "Hi <b> & </b>!"
    body = {"model": "gemma-plain", "input": "Hi", "reasoning": {"effort": "medium"}, "tools": [{"type": "web_search"}]}
    assert server.client.post("/v1/responses", json=body).json()["output"][0]["content"][0]["text"] == "Hi <b> & </b>!"
    unlimited = server.client.post("/v1/chat/completions", json={**ask, "max_tokens": -1})
    assert unlimited.json()["choices"][0]["finish_reason"] == "stop"


def test_capabilities_come_from_the_template(server: Live) -> None:
    def capabilities(name: str) -> set[str]:
        return set(server.client.post("/api/show", json={"model": name}).json()["capabilities"])

    assert capabilities("qwen-one-call") == {"completion", "tools", "thinking"}
    assert capabilities("mistral-list") == {"completion", "tools"}
    assert capabilities("gemma-plain") == {"completion"}


FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def test_fill_in_the_middle(server: Live, tmp_path: Path) -> None:
    file = forced_gguf(tmp_path / "filler.gguf", "a + b", template("chatml"), controls=FIM, after="<|fim_middle|>")
    server.state.catalog.add_file(file)
    prefix, suffix = "def f(a, b):\n    return ", "\n\nprint(f(1, 2))"
    ask = {"model": "filler", "prompt": prefix, "suffix": suffix, "stream": False}
    reply = server.client.post("/api/generate", json=ask).json()
    assert reply["response"] == "a + b" and reply["prompt_eval_count"] == len(prefix) + len(suffix) + 3
    choice = server.client.post("/v1/completions", json=ask).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a + b", "stop")
    assert "insert" in server.client.post("/api/show", json={"model": "filler"}).json()["capabilities"]
    refused = server.client.post("/api/generate", json={**ask, "model": "gemma-plain"})
    assert refused.status_code == 400 and "does not support insert" in refused.json()["error"]
