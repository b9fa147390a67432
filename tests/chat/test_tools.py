"""From a template and a prompt to the right parser: marks shown, thoughts that the prompt opened, grammar leads."""

from __future__ import annotations

import pytest

from edgellm import SamplingParams
from edgellm.chat.grammar import Lead
from edgellm.chat.harmony import HARMONY_MARKS
from edgellm.chat.reply import PlainParser
from edgellm.chat.tools import ReplyStyle
from edgellm.tokenizer import from_metadata
from tests.chat.test_reply import ARGUMENTS, JSON, TOOLS
from tests.support.scripted import scripted_llm
from tests.tokenizer.vocabs import smollm2


def tokenizer_with(*marks, kind=3):
    tokens, types = (list(smollm2()[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
    for i, mark in enumerate(marks):
        tokens[300 + i], types[300 + i] = mark, kind
    return from_metadata(smollm2(tokens=tokens, token_type=types))


def run(style, tokenizer, ids, reply, tools=TOOLS):
    """What the engine and the parser make of a reply's ids."""
    decoder = tokenizer.stream_decoder(after=ids[-1], show=style.shown)
    parser = style.parser(ids, tools)
    events = [e for i in tokenizer.encode(reply, special=True, bos=False) for e in parser.push(decoder.push(i))]
    events += parser.push(decoder.finish()) + parser.finish()
    joined = ["".join(getattr(e, kind) for e in events) for kind in ("content", "thinking")]
    return (*joined, [call for e in events for call in e.calls])


def test_marks_that_are_control_tokens_reach_the_parser():
    tokenizer = tokenizer_with("[TOOL_CALLS]", "[ARGS]")
    style = ReplyStyle("{% if tools %}[TOOL_CALLS]", tokenizer)
    assert style.shown == {300, 301}
    ids = tokenizer.encode("Hi")
    assert run(style, tokenizer, ids, '[TOOL_CALLS]get_time[ARGS]{"city": "Zürich", "n": 3}<|im_end|>') == (
        "",
        "",
        [("get_time", ARGUMENTS)],
    )


def test_harmony_marks_reach_the_parser():
    tokenizer = tokenizer_with(*HARMONY_MARKS)
    style = ReplyStyle("<|channel|>analysis<|message|>", tokenizer)
    assert len(style.shown) == len(HARMONY_MARKS)
    ids = tokenizer.encode("<|start|>assistant", special=True)
    reply = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    assert run(style, tokenizer, ids, reply) == ("Hi", "hm", [])
    assert tokenizer.token_id("<|end|>") not in tokenizer.eog_ids
    assert tokenizer.token_id("<|call|>") in tokenizer.eog_ids


@pytest.mark.parametrize(
    "tail, opened",
    [
        ("assistant\n<think>\n", True),
        ("assistant\n<think>\n\n</think>\n\n", False),
        ("assistant\n", False),
        ("<think> is a tag", False),
    ],
)
def test_b18_the_prompt_may_open_the_thought(tail, opened):
    tokenizer = from_metadata(smollm2())
    style = ReplyStyle("<think> </think>", tokenizer)
    ids = tokenizer.encode("word " * 100 + tail)
    assert style.opens_thought(ids) is opened
    assert run(style, tokenizer, ids, "a</think>X")[:2] == (("X", "a") if opened else ("a</think>X", ""))
    assert style.lead(ids) == Lead(closer="</think>", opener=None if opened else "<think>")
    assert style.lead(ids, think=False) == (Lead(closer="</think>") if opened else None)


def test_plain_families_and_requests_without_tools():
    tokenizer = from_metadata(smollm2())
    assert isinstance(ReplyStyle("{{ messages }}", tokenizer).parser([1], TOOLS), PlainParser)
    hermes = ReplyStyle("<tool_call> tools", tokenizer)
    assert isinstance(hermes.parser([1]), PlainParser)
    assert run(hermes, tokenizer, [1], "<tool_call>{}</tool_call>", None)[0] == "<tool_call>{}</tool_call>"
    assert hermes.lead([1]) is None


def test_the_python_api_tells_reasoning_and_calls_apart():
    reply = f"<think>hm</think>\nOk.<tool_call>{JSON}</tool_call>"
    with scripted_llm(reply) as llm:
        llm.template.source, llm.template.supports_tools = "<tool_call> tools <think> </think>", True
        done = llm.chat([{"role": "user", "content": "x"}], SamplingParams(temperature=0), tools=TOOLS)
        assert (done.text, done.reasoning) == ("Ok.", "hm")
        assert done.tool_calls == [{"type": "function", "function": {"name": "get_time", "arguments": ARGUMENTS}}]
        plain = llm.chat([{"role": "user", "content": "x"}], SamplingParams(temperature=0))
        assert plain.text == f"Ok.<tool_call>{JSON}</tool_call>" and plain.tool_calls == []
