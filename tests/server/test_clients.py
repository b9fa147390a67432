"""The clients that people have, unchanged, against a running server.

Each runs on a tiny model of noise in the default suite, where only shapes can be asked for, and on the demo model with
`-m real`. A client that is not installed is skipped; `.ci/run` installs them all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import Live
from tests.server.model_store import live_store, own_home, store_model
from tests.support.real import real_model
from tests.support.tiny import tiny_gguf

HI = [{"role": "user", "content": "Say hello."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIMIT = 12


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.real)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("home")
    with own_home(folder) as store:
        if request.param == "tiny":
            file, backend = tiny_gguf(folder / "tiny.gguf", context_length=512), "reference"
        else:
            file, backend = real_model("smollm2.gguf"), "auto"
        store_model(store, "demo", file)
        with live_store(store, backend) as running:
            yield running


def test_ollama_python(server: Live) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    assert [model.model for model in client.list().models] == ["demo:latest"]
    shown = client.show("demo")
    assert "completion" in shown.capabilities and shown.modelinfo["general.architecture"] == "llama"
    options = {"num_predict": LIMIT, "temperature": 0}
    whole = client.chat("demo", HI, options=options)
    assert whole.message.role == "assistant" and whole.done and whole.eval_count and whole.created_at
    parts = list(client.chat("demo", HI, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert all(part.message.role == "assistant" for part in parts) and parts[-1].done
    text = client.generate("demo", "Once", options=options)
    assert text.response == "".join(p.response for p in client.generate("demo", "Once", options=options, stream=True))
    assert len(text.context) > LIMIT
    vectors = client.embed("demo", ["a", "b"]).embeddings
    assert len(vectors) == 2 and sum(x * x for x in vectors[0]) == pytest.approx(1, abs=1e-3)
    assert [model.model for model in client.ps().models] == ["demo:latest"]
    with pytest.raises(ollama.ResponseError, match="model 'nope' not found") as caught:
        client.chat("nope", HI)
    assert caught.value.status_code == 404


def test_openai_python(server: Live) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert [model.id for model in client.models.list().data] == ["demo:latest"]
    assert client.models.retrieve("demo").id == "demo"
    ask: dict[str, Any] = {"model": "demo", "messages": HI, "max_completion_tokens": LIMIT, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].message.role == "assistant" and whole.usage.total_tokens > LIMIT
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == (whole.choices[0].message.content or "")
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    logprobs = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(logprobs) == whole.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in logprobs)
    several = client.chat.completions.create(**ask, n=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    text = client.completions.create(model="demo", prompt="Once", max_tokens=LIMIT, logprobs=2, temperature=0)
    assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens
    texts = client.completions.create(model="demo", prompt=["Once", "Twice"], n=2, echo=True, max_tokens=2)
    assert [(c.index, c.text[:4]) for c in texts.choices] == [(0, "Once"), (1, "Once"), (2, "Twic"), (3, "Twic")]
    vectors = client.embeddings.create(model="demo", input=["a", "b"]).data
    assert sum(x * x for x in vectors[1].embedding) == pytest.approx(1, abs=1e-3)
    with pytest.raises(openai.NotFoundError, match="model 'nope' not found"):
        client.chat.completions.create(model="nope", messages=HI)
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(**ask, logprobs=True, top_logprobs=21)


def test_openai_responses(server: Live) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    ask: dict[str, Any] = {"model": "demo", "input": "Say hello.", "max_output_tokens": LIMIT, "temperature": 0}
    whole = client.responses.create(**ask)
    assert whole.status in ("completed", "incomplete") and whole.usage.output_tokens
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert streamed == whole.output_text == events[-1].response.output_text


def test_anthropic_python(server: Live) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    ask: dict[str, Any] = {"model": "demo", "messages": HI, "max_tokens": LIMIT, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**ask)
    assert whole.role == "assistant" and whole.stop_reason in ("max_tokens", "end_turn")
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content)
    assert (final.usage.input_tokens, final.usage.output_tokens) == (
        whole.usage.input_tokens,
        whole.usage.output_tokens,
    )
    counted = client.messages.count_tokens(model="demo", messages=HI)
    assert counted.input_tokens == whole.usage.input_tokens
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ask, "model": "nope"})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="nope", messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="at least one message"):
        client.messages.count_tokens(model="demo", messages=[])


def test_langchain_ollama(server: Live) -> None:
    langchain = pytest.importorskip("langchain_ollama")
    model = langchain.ChatOllama(
        model="demo", base_url=server.url, num_predict=LIMIT, temperature=0, validate_model_on_init=True
    )
    whole = model.invoke("Say hello.")
    assert whole.usage_metadata["output_tokens"] > 0 and whole.response_metadata["done_reason"] in ("stop", "length")
    assert "".join(chunk.content for chunk in model.stream("Say hello.")) == whole.content
    vectors = langchain.OllamaEmbeddings(model="demo", base_url=server.url).embed_documents(["a", "b"])
    assert len(vectors) == 2
    text = langchain.OllamaLLM(model="demo", base_url=server.url, num_predict=LIMIT, temperature=0)
    assert isinstance(text.invoke("Once"), str)


def test_langchain_openai(server: Live) -> None:
    langchain = pytest.importorskip("langchain_openai")
    where = {"model": "demo", "base_url": f"{server.url}/v1", "api_key": "none"}
    model = langchain.ChatOpenAI(**where, max_tokens=LIMIT, temperature=0)
    whole = model.invoke("Say hello.")
    assert "".join(chunk.content for chunk in model.stream("Say hello.")) == whole.content
    # Sends token ids, not texts, unless told otherwise: its own tokenizer's, which only a real vocabulary holds.
    vectors = langchain.OpenAIEmbeddings(**where, check_embedding_ctx_length=False).embed_documents(["a", "b"])
    assert len(vectors) == 2


def checked(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "age"} and len(value["name"]) <= 8 and 0 <= value["age"] <= 99


def test_structured_output(server: Live) -> None:
    ollama, openai = pytest.importorskip("ollama"), pytest.importorskip("openai")
    anthropic, langchain = pytest.importorskip("anthropic"), pytest.importorskip("langchain_ollama")
    ask = [{"role": "user", "content": "Tell me of a person."}]
    checked(ollama.Client(host=server.url).chat("demo", ask, format=SCHEMA).message.content)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    reply = client.chat.completions.create(model="demo", messages=ask, response_format=wanted)
    checked(reply.choices[0].message.content)
    text: Any = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
    checked(client.responses.create(model="demo", input="Tell me.", text=text).output_text)
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    claude = anthropic.Anthropic(base_url=server.url, api_key="none")
    message = claude.messages.create(model="demo", messages=ask, max_tokens=200, extra_body={"output_config": config})
    checked(message.content[0].text)
    model = langchain.ChatOllama(model="demo", base_url=server.url)
    person = model.with_structured_output({"title": "Person", **SCHEMA}, method="json_schema").invoke("Tell me.")
    checked(json.dumps(person))


LLM_OLLAMA = """
import json, llm
model = llm.get_model("ollama/demo:latest")
options = {"num_predict": 12, "temperature": 0}
whole = model.prompt("Say hello.", stream=False, **options).text()
pieces = list(model.prompt("Say hello.", **options))
print(json.dumps([whole, "".join(pieces), len(pieces)]))
"""


def test_llm_ollama(server: Live, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    pytest.importorskip("llm_ollama")
    # In a process of its own: it reads its settings and asks the server for its models when it is imported.
    env = {**os.environ, "OLLAMA_HOST": server.url, "LLM_USER_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LLM_OLLAMA], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    whole, streamed, _ = json.loads(done.stdout.splitlines()[-1])
    assert whole == streamed


JS = """
import { Ollama } from "ollama";
const client = new Ollama({ host: process.env.HOST });
const messages = [{ role: "user", content: "Say hello." }], options = { num_predict: 12, temperature: 0 };
const list = await client.list(), show = await client.show({ model: "demo" });
const whole = await client.chat({ model: "demo", messages, options });
let streamed = "", ends = 0;
for await (const part of await client.chat({ model: "demo", messages, options, stream: true })) {
  streamed += part.message.content; ends += part.done;
}
const embed = await client.embed({ model: "demo", input: ["a", "b"] });
let error = "";
try { await client.chat({ model: "nope", messages }); } catch (e) { error = e.message; }
console.log(JSON.stringify({ names: list.models.map((m) => m.model), capabilities: show.capabilities,
  same: streamed === whole.message.content, ends, vectors: embed.embeddings.length, error }));
"""


def test_ollama_js(server: Live, tmp_path: Path) -> None:
    node = shutil.which("node")
    modules = os.environ.get("EDGELLM_NODE_MODULES", "")
    if node is None or not Path(modules, "ollama").is_dir():
        pytest.skip("needs node, and EDGELLM_NODE_MODULES naming a node_modules folder that holds ollama")
    (tmp_path / "node_modules").symlink_to(modules)
    (tmp_path / "try.mjs").write_text(JS)
    done = subprocess.run(
        [node, "try.mjs"],
        cwd=tmp_path,
        env={**os.environ, "HOST": server.url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["names"] == ["demo:latest"] and "completion" in said["capabilities"]
    assert said["same"] and said["ends"] == 1 and said["vectors"] == 2
    assert said["error"] == "model 'nope' not found"
