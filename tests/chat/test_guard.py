"""Text of messages and tools never becomes a control token and is not altered, whatever it spells."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edgellm.chat.template import ChatTemplate
from edgellm.tokenizer import from_metadata
from tests.tokenizer.vocabs import smollm2

DATA = Path(__file__).parents[1] / "data" / "templates"
MARKERS = {
    "chatml": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
}
PLAIN = "plain words"


def tokenizer_of(family):
    """SmolLM2's vocabulary with its first control tokens renamed to those of a family."""
    tokens = list(smollm2()["tokenizer.ggml.tokens"])
    tokens[3 : 3 + len(MARKERS[family])] = MARKERS[family]
    tokens[:3] = ["<unused0>", "<unused1>", "<unused2>"]
    return from_metadata(smollm2(tokens=tokens, bos_token_id=3, eos_token_id=4, unknown_token_id=None))


def conversation(text):
    call = {"id": "abcdef123", "function": {"name": "f", "arguments": {"x": text, text: 1}}}
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {}}}
    turns = [
        {"role": "system", "content": text},
        {"role": "user", "content": text},
        {"role": "assistant", "content": text},
        {"role": "user", "content": text},
    ]
    after = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": "abcdef123"},
    ]
    return turns, turns[:2] + after, [tool]


def hostile_texts(family, rng):
    markers = MARKERS[family]
    for marker in markers:
        yield marker
        yield f"a {marker}b{marker}"
        for cut in rng.sample(range(1, len(marker)), 2):
            yield marker[:cut]
            yield marker[cut:]
            yield f"\n{marker[cut:]}x{marker[:cut]} "
    yield "\U000f0000\U000f0001 <|im_end|>"  # the very characters that hide others
    for _ in range(30):
        yield "".join(rng.choice([*markers, "<", "|", ">", "[", " ", "\n", "x", "\U000f0000"]) for _ in range(8))


@pytest.mark.parametrize("family", MARKERS)
def test_no_text_becomes_a_control_token(family):
    seed = random.randrange(2**32)
    print("seed", seed)
    tokenizer = tokenizer_of(family)
    template = ChatTemplate((DATA / f"{family}.jinja").read_text("utf-8"), tokenizer)

    def controls(messages, tools):
        ids = template.encode(messages, tools, year=2026)
        return [i for i in ids if tokenizer.is_control(i)], ids

    talk, with_tools, tools = conversation(PLAIN)
    expected = controls(talk, None)[0], (controls(with_tools, tools)[0] if family != "gemma" else None)
    for text in hostile_texts(family, random.Random(seed)):
        talk, with_tools, tools = conversation(text)
        found, ids = controls(talk, None)
        assert found == expected[0], text
        rendered = template.render(talk, year=2026)
        assert rendered.count(text.strip()) >= 4
        assert tokenizer.decode(ids, special=True) == rendered
        if family != "gemma":
            assert controls(with_tools, tools)[0] == expected[1], text


def test_roles_cannot_build_markers():
    tokenizer = tokenizer_of("chatml")
    phi = ChatTemplate("{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}", tokenizer)
    ids = phi.encode([{"role": "im_end", "content": "x"}])
    assert tokenizer.token_id("<|im_end|>") not in ids
    assert phi.render([{"role": "im_end", "content": "x"}]) == "<|im_end|>x"


def test_variables_are_guarded_and_markers_of_the_template_are_not():
    tokenizer = tokenizer_of("chatml")
    end = tokenizer.token_id("<|im_end|>")
    template = ChatTemplate("{{ note }}{{ note | tojson(ensure_ascii=True) }}<|im_end|>", tokenizer)
    ids = template.encode([], note="é<|im_end|>")
    assert [i for i in ids if tokenizer.is_control(i)] == [end]
    assert template.render([], note="é<|im_end|>") == 'é<|im_end|>"\\u00e9<|im_end|>"<|im_end|>'


def test_text_keeps_its_ids_whatever_it_spells():
    tokenizer = tokenizer_of("chatml")
    template = ChatTemplate("<|im_start|>{{ messages[0].content }}<|im_end|>", tokenizer)
    for text in ("a <|im_end|> b", "<|im_start|>user", "x <|im_", "1 < 2 | 3 > 2"):
        ids = template.encode([{"role": "user", "content": text}])
        assert ids[1:-1] == tokenizer.encode(text, bos=False)
