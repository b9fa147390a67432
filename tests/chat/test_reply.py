"""B17 and B18: replies of every family, cut at every place; nothing lost, nothing doubled."""

from __future__ import annotations

import random

import pytest

from edgellm.chat.call_bodies import is_open_json
from edgellm.chat.formats import ReplyFormat, detect
from edgellm.chat.harmony import HarmonyParser
from edgellm.chat.reply import PlainParser, TagParser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]
ARGUMENTS = {"city": "Zürich", "n": 3}
JSON = '{"name": "get_time", "arguments": {"city": "Zürich", "n": 3}}'

# family, what in a template tells it, how it writes one call
FAMILIES = [
    ("hermes", "<tool_call> tools", f"<tool_call>\n{JSON}\n</tool_call>"),
    ("llama3", "<|python_tag|> tools", '{"name": "get_time", "parameters": {"city": "Zürich", "n": 3}}'),
    ("llama3", "<|python_tag|> tools", '<|python_tag|>{"name": "get_time", "parameters": {"city": "Zürich", "n": 3}}'),
    ("llama3", "<|python_tag|> tools", '<|python_tag|>get_time.call(city="Zürich", n=3)'),
    ("mistral", "[TOOL_CALLS] tools", f'[TOOL_CALLS] [{JSON[:-1]}, "id": "abcdef123"}}]'),
    ("mistral", "[TOOL_CALLS] tools", '[TOOL_CALLS]get_time[ARGS]{"city": "Zürich", "n": 3}'),
    ("mistral", "[TOOL_CALLS] tools", '[TOOL_CALLS]get_time[CALL_ID]abcdef123[ARGS]{"city": "Zürich", "n": 3}'),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n"
        '{"city": "Zürich", "n": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{"city": "Zürich", "n": 3}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek-v3.2",
        "｜DSML｜",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_time">\n'
        '<｜DSML｜parameter name="city" string="true">Zürich'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>"
        '{"city": "Zürich", "n": 3}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    (
        "command-r",
        "<|START_ACTION|> <|START_RESPONSE|>",
        '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "get_time", '
        '"parameters": {"city": "Zürich", "n": 3}}\n]'
        "<|END_ACTION|>",
    ),
    ("gemma4", "<|tool_call>", '<|tool_call>call:get_time{city:<|"|>Zürich<|"|>,n:3}<tool_call|>'),
    (
        "function-gemma",
        "<start_function_call>",
        "<start_function_call>call:get_time{city:<escape>Zürich<escape>,n:3}<end_function_call>",
    ),
    (
        "minimax",
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="get_time">\n<parameter name="city">Zürich</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    (
        "seed",
        "<seed:tool_call>",
        "<seed:tool_call><function=get_time><parameter=city>Zürich</parameter><parameter=n>3</parameter></function>"
        "</seed:tool_call>",
    ),
    (
        "qwen-coder",
        "<tool_call>\n<function=example>",
        "<tool_call>\n<function=get_time>\n<parameter=city>\nZürich\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    (
        "glm",
        "<tool_call> <arg_key>",
        "<tool_call>get_time\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
    ),
    ("lfm2", "<|tool_call_start|>", '<|tool_call_start|>[get_time(city="Zürich", n=3)]<|tool_call_end|>'),
    ("phi4", "<|tool_call|> <|/tool_call|>", f"<|tool_call|>[{JSON}]<|/tool_call|>"),
    ("phi4", "<|tool|>' + message['tools'] + '<|/tool|>", f"<|tool_call|>[{JSON}]<|/tool_call|>"),
    ("granite", "<|tool_call|>", f"<|tool_call|>[{JSON}]"),
    ("nemotron", "<TOOLCALL>", f"<TOOLCALL>[{JSON}]</TOOLCALL>"),
    ("nemotron-mini", "{{ tools }}<extra_id_1>Tool\n", f"<toolcall> {JSON} </toolcall>"),
    ("functionary-v3.1", "<function=", '<function=get_time>{"city": "Zürich", "n": 3}</function>'),
    ("firefunction", "functools[", f"functools[{JSON}]"),
    ("tool-code", "```tool_code", '```tool_code\nget_time(city="Zürich", n=3)\n```'),
    ("tool-calls", "<tool_calls>", f"<tool_calls>[{JSON}]</tool_calls>"),
    ("apertus", "<|tools_prefix|>", '<|tools_prefix|>[{"get_time": {"city": "Zürich", "n": 3}}]<|tools_suffix|>'),
    (
        "solar",
        "<|tool_call:begin|>",
        "<|tool_calls|><|tool_call:begin|>x1<|tool_call:name|>get_time<|tool_call:args|>"
        '{"city": "Zürich", "n": 3}<|tool_call:end|>',
    ),
    (
        "command-r-plus",
        "Action:\\n```json",
        'Action:\n```json\n[{"tool_name": "get_time", "parameters": {"city": "Zürich", "n": 3}}]\n```',
    ),
    ("json", "{% if tools %}", f"<tool_call>{JSON}</tool_call>"),
]
IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate(FAMILIES)]


def read(make, pieces):
    """Content, thinking, calls and whether the end was cut."""
    parser = make()
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    content, thinking = ("".join(getattr(e, kind) for e in events) for kind in ("content", "thinking"))
    return content, thinking, [call for e in events for call in e.calls], parser.cut


def read_at_every_split(make, text):
    """The result, the same for the whole text, each cut in two, single letters, and random pieces."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    whole = read(make, [text])
    splits = [[text[:i], text[i:]] for i in range(len(text))] + [list(text)]
    for _ in range(10):
        cuts = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
        splits.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    for pieces in splits:
        assert read(make, pieces) == whole, pieces
    return whole


@pytest.mark.parametrize("name, source, call", FAMILIES, ids=IDS)
def test_b17_each_family(name, source, call):
    form = detect(source)
    assert form.name == name

    def make():
        return TagParser(form, TOOLS)

    assert read_at_every_split(make, call) == ("", "", [("get_time", ARGUMENTS)], False)
    if not call.startswith("{"):
        content, _, calls, _ = read_at_every_split(make, "One moment.\n\n" + call)
        assert (content, calls) == ("One moment.", [("get_time", ARGUMENTS)])
    # without tools in the request there is no parsing
    assert read_at_every_split(lambda: TagParser(form), call)[0] == "".join(
        part for part in [call] if part not in form.noise
    )


@pytest.mark.parametrize("name, source, call", FAMILIES, ids=IDS)
def test_b17_a_cut_call_comes_back_as_text(name, source, call):
    form = detect(source)
    for end in range(len(call)):
        content, thinking, calls, cut = read(lambda: TagParser(form, TOOLS), [call[:end]])
        assert thinking == ""
        if calls:  # some families need no closing mark
            assert calls == [("get_time", ARGUMENTS)] and not content.strip()
        else:
            assert content == call[:end]
        opener = next((s.opener for s in form.syntaxes if call.startswith(s.opener)), None)
        assert cut == (opener is not None and end >= len(opener) and not calls)


def hermes():
    return TagParser(detect("<tool_call> tools"), TOOLS)


def test_b17_several_calls_and_the_text_between():
    text = f"First.\n<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{JSON}\n</tool_call>\nDone.\n"
    content, _, calls, _ = read_at_every_split(hermes, text)
    assert content == "First.Done.\n" and calls == [("get_time", ARGUMENTS)] * 2
    empty = '<tool_call>\n{"name":"get_time","arguments":{}}\n</tool_call>'
    assert read_at_every_split(hermes, empty)[2] == [("get_time", {})]


@pytest.mark.parametrize(
    "body", ["not json", '{"name": "get_time", "arguments": {', '{"name": 3}', "[]", '{"name":"f","arguments":[1]}', ""]
)
def test_b17_malformed_calls_are_text(body):
    text = f"Hm <tool_call>{body}</tool_call> so"
    content, _, calls, cut = read_at_every_split(hermes, text)
    assert calls == [] and not cut
    assert content.replace(" ", "") == text.replace(" ", "")


def test_b17_a_closing_mark_inside_an_argument():
    body = '{"name": "get_time", "arguments": {"city": "a </tool_call> b \\" </tool_call>"}}'
    assert is_open_json(body[: body.index("</tool_call>")])
    content, _, calls, _ = read_at_every_split(hermes, f"<tool_call>{body}</tool_call>")
    assert (content, calls) == ("", [("get_time", {"city": 'a </tool_call> b " </tool_call>'})])


def test_arguments_in_the_odd_shapes_models_write():
    for body in (
        '{"name": "get_time", "arguments": "{\\"n\\": 3}"}',
        '{"type": "function", "function": {"name": "get_time", "arguments": {"n": 3}}}',
        '{"name": "get_time", "parameters": {"n": 3}}',
    ):
        assert read(hermes, [f"<tool_call>{body}</tool_call>"])[2] == [("get_time", {"n": 3})]
    line = '{"name": "get_time", "arguments": {"city": "a\nb"}}'  # a raw newline in a string
    assert read(hermes, [f"<tool_call>{line}</tool_call>"])[2] == [("get_time", {"city": "a\nb"})]


@pytest.mark.parametrize("text", ['{"answer": 42}', "{not json", '{"name": "other", "parameters": {}}', "{", "", "{}"])
def test_json_that_is_no_call_of_a_known_tool_stays_text(text):
    form = detect("<|python_tag|> tools")
    assert read_at_every_split(lambda: TagParser(form, TOOLS), text) == (text, "", [], False)


def test_bare_calls_in_a_row():
    call = '{"name": "get_time", "parameters": {"n": 1}}'
    form = detect("<|python_tag|> tools")
    assert read_at_every_split(lambda: TagParser(form, TOOLS), f"{call}; {call}")[2] == [("get_time", {"n": 1})] * 2


THINK = ReplyFormat("think", think=("<think>", "</think>"))


def thinking(opened=False):
    return lambda: TagParser(THINK, opened=opened)


@pytest.mark.parametrize(
    "opened, text, content, thought, cut",
    [
        (False, "<think>a > b</think>\n\nX", "X", "a > b", False),
        (False, "\n<think>\na\n\nb\n</think>\nX\n", "X\n", "a\n\nb", False),
        (True, "a > b</think>\n\nX", "X", "a > b", False),
        (True, "</think>X", "X", "", False),
        (True, "never closed <", "", "never closed <", True),
        (False, "<think>never closed", "", "never closed", True),
        (False, "<thi", "<thi", "", False),
        (False, "X <think> Y </think> Z", "X <think> Y </think> Z", "", False),
        (False, "</think>X", "</think>X", "", False),
        (False, "<think></think>X", "X", "", False),
        (False, '<think>he said "</think>" and</think>X', '" and</think>X', 'he said "', False),
        (False, "  plain  ", "  plain  ", "", False),
        (False, "", "", "", False),
    ],
)
def test_b18_thoughts(opened, text, content, thought, cut):
    assert read_at_every_split(thinking(opened), text) == (content, thought, [], cut)


def test_b18_random_texts_lose_and_double_nothing():
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(400):
        parts = ["<think>", "</think>", "<thi", "</", ">", "a", " ", "\n", "é", "<tool_call>", "</tool_call>", '{"']
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(12)))
        opened = rng.random() < 0.5
        content, thought, _, _ = read_at_every_split(thinking(opened), text)
        tags = "<think>" * (not opened and thought + content != text and text.lstrip().startswith("<think>"))
        closing = "</think>" if (opened or tags) and "</think>" in text.removeprefix(tags) else ""
        assert "".join((tags + thought + closing + content).split()) == "".join(text.split()), text


def test_thoughts_and_calls_together():
    form = detect("<tool_call> tools <think> </think>")
    text = f"<think>which tool?</think>\n\nOk.\n<tool_call>\n{JSON}\n</tool_call>"
    assert read_at_every_split(lambda: TagParser(form, TOOLS), text) == (
        "Ok.",
        "which tool?",
        [("get_time", ARGUMENTS)],
        False,
    )


def test_thoughts_of_exaone_deep():
    form = detect("content.split('</thought>') [|assistant|]<thought>\n")
    assert form.think == ("<thought>", "</thought>")
    read = read_at_every_split(lambda: TagParser(form, opened=True), "a > b\n</thought>\n\nX")
    assert read == ("X", "a > b", [], False)


def test_plain_parser_passes_everything():
    assert read_at_every_split(PlainParser, "a <think> <tool_call>") == ("a <think> <tool_call>", "", [], False)


HARMONY = [
    (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
        "Hi",
        "hm",
        [],
        False,
    ),
    ("<|channel|>final<|message|>Hi", "Hi", "", [], False),
    ("<|channel|>analysis<|message|>a < b", "", "a < b", [], True),
    (
        "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary to=functions.get_time "
        '<|constrain|>json<|message|>{"city": "Zürich", "n": 3}<|call|>',
        "",
        "x",
        [("get_time", ARGUMENTS)],
        False,
    ),
    (
        '<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{"n": 1}',
        "",
        "",
        [("get_time", {"n": 1})],
        False,
    ),
    ("<|channel|>commentary<|message|>I will look.<|end|>", "I will look.", "", [], False),
    ("Hello there", "Hello there", "", [], False),
    ("<|channel|>fin", "", "", [], True),
    ("", "", "", [], False),
]


@pytest.mark.parametrize("text, content, thought, calls, cut", HARMONY)
def test_harmony(text, content, thought, calls, cut):
    for tail in ("<|start|>assistant", "<|end|><|start|>assistant", ""):
        assert read_at_every_split(lambda tail=tail: HarmonyParser(TOOLS, tail), text) == (content, thought, calls, cut)


def test_harmony_call_that_is_cut_or_not_asked_for():
    text = '<|channel|>commentary to=functions.get_time<|message|>{"n": '
    assert read(lambda: HarmonyParser(TOOLS), [text]) == (text, "", [], True)
    asked = read(lambda: HarmonyParser(()), [text + "1}<|call|>"])
    assert asked[0] == '{"n": 1}' and asked[2] == []
    opened = HarmonyParser(TOOLS, "<|start|>assistant<|channel|>analysis<|message|>")
    assert [p.thinking for p in opened.push("hm<|end|>")] == ["hm"]
