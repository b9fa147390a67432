"""Golden wire files: the same three answers in every dialect, whole and streamed.

The files were checked by hand against the vendors' documents when they were made; `EDGELLM_WRITE_GOLDEN=1` writes them
again, for review in the diff.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm.server import anthropic_wire, errors, job, ollama_wire, openai_frames, responses_frames
from edgellm.server.anthropic_wire import MessageFrames
from edgellm.server.frames import Framer
from edgellm.server.job import Delta, Finish, Job, ToolCall
from edgellm.server.ollama_wire import OllamaChunks
from edgellm.server.openai_frames import ChatFrames, CompletionFrames
from edgellm.server.responses_frames import ResponseFrames

GOLDEN = Path(__file__).parent / "golden"
END = Finish("stop", 12, 4, 5, 2, None, 0.5, 0.25, 0.125, 1.0, (7, 8, 9))
CUT = Finish("length", 12, 0, 5, 0, "the model was just loaded", 0.0, 0.25, 0.125, 1.0, (7, 8), (4, 100))
ANSWERS = {
    "text": [Delta(content="Grüße, "), Delta(content="\u2028\U0001f999"), Delta(finish=CUT)],
    "thought": [Delta(thinking="a > ", prompt_tokens=12), Delta(thinking="b"), Delta(content="X"), Delta(finish=END)],
    "tools": [
        Delta(content="Let me see."),
        Delta(tool_calls=(ToolCall(0, "weather", {"city": "Zürich", "n": 3}, "call_aaaaaaaa"),)),
        Delta(tool_calls=(ToolCall(1, "time", {}, "call_bbbbbbbb"),), finish=END),
    ],
}
JOB = Job("m", messages=({"role": "user", "content": "Hi"},))
FRAMERS = {
    "ollama_chat": lambda: OllamaChunks("m", chat=True),
    "ollama_generate": lambda: OllamaChunks("m", chat=False),
    "openai_chat": lambda: ChatFrames("m", include_usage=True),
    "openai_completion": lambda: CompletionFrames("m"),
    "openai_responses": lambda: ResponseFrames(JOB),
    "anthropic_messages": lambda: MessageFrames("m"),
}


@pytest.fixture(autouse=True)
def fixed_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The clock stands still and ids count up, so that bytes can be compared."""
    numbers = itertools.count(1)
    for module in (job, openai_frames, responses_frames, anthropic_wire):
        monkeypatch.setattr(module, "new_id", lambda prefix, length=24: f"{prefix}{next(numbers)}")
    for module in (openai_frames, responses_frames):
        monkeypatch.setattr(module.time, "time", lambda: 1_700_000_000.0)
    monkeypatch.setattr(ollama_wire, "utc_stamp", lambda: "2023-11-14T22:13:20.000000Z")
    monkeypatch.setattr(errors.secrets, "token_hex", lambda n: "0" * 2 * n)
    yield


def compare(name: str, data: bytes) -> None:
    path = GOLDEN / name
    if os.environ.get("EDGELLM_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    assert data == path.read_bytes()


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("kind", FRAMERS)
def test_streams_are_as_the_golden_files(kind: str, answer: str) -> None:
    framer: Framer = FRAMERS[kind]()
    frames = framer.open() + [frame for delta in ANSWERS[answer] for frame in framer.push(delta)] + framer.close()
    suffix = "ndjson" if framer.media_type == "application/x-ndjson" else "sse"
    compare(f"{kind}-{answer}.{suffix}", b"".join(frames))


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("kind", FRAMERS)
def test_whole_replies_are_as_the_golden_files(kind: str, answer: str) -> None:
    whole = FRAMERS[kind]().whole(ANSWERS[answer])
    compare(f"{kind}-{answer}.json", json.dumps(whole, indent=1, ensure_ascii=False).encode() + b"\n")


@pytest.mark.parametrize("kind", FRAMERS)
def test_broken_streams_are_as_the_golden_files(kind: str) -> None:
    framer: Framer = FRAMERS[kind]()
    frames = framer.open() + framer.push(Delta(content="Hel")) + framer.fail(500, "it broke")
    compare(f"{kind}-broken", b"".join(frames))


@pytest.mark.parametrize("kind", FRAMERS)
def test_b14_every_line_is_one_line_for_every_reader(kind: str) -> None:
    framer: Framer = FRAMERS[kind]()
    text = 'a\n\r\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1eb"\\\x00'
    data = b"".join(framer.push(Delta(content=text)))
    lines = [line for line in data.decode().splitlines() if line and not line.startswith("event:")]
    objects = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert text in strings(objects)


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def test_b16_an_answer_without_text_has_a_role_and_an_end() -> None:
    frames = ChatFrames("m").push(Delta(finish=END))
    first, last = (json.loads(frame.removeprefix(b"data: "))["choices"][0] for frame in frames)
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    assert last["delta"] == {} and last["finish_reason"] == "stop"


def test_several_answers_share_one_prompt_in_usage() -> None:
    deltas = [Delta(1, content="b"), Delta(0, content="a"), Delta(1, finish=END), Delta(0, finish=END)]
    reply = ChatFrames("m").whole(deltas)
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["a", "b"]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (12, 10)
    assert reply["usage"]["total_tokens"] == 22
