"""Grammar masks: what they let through, that they end, and B19 (JSON mode cannot run on in blanks)."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

from edgellm.chat.grammar import GrammarCompiler, Lead
from edgellm.chat.json_bounds import MAX_BLANKS, MAX_DEPTH, MAX_DIGITS, MAX_NAME, JSONPlace
from edgellm.errors import GrammarError
from edgellm.tokenizer import from_metadata
from tests.tokenizer.vocabs import smollm2


@pytest.fixture(scope="module")
def tokenizer():
    return from_metadata(smollm2())


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer)


def follows(compiler, tokenizer, factory, text, special=False):
    """Whether the grammar lets `text` through, token by token; and whether it then is complete."""
    grammar = factory()
    done = False
    for token in tokenizer.encode(text, special=special, bos=False):
        if not grammar.allowed(tokenizer.vocab_size)[token]:
            return None
        done = grammar.accept(token)
    return done or bool(grammar.allowed(tokenizer.vocab_size)[tokenizer.eos_id])


def generate(tokenizer, grammar, choose, most=400):
    """Tokens chosen by `choose(allowed ids)` until an end token or `most` of them; text and whether it ended."""
    ids = []
    while len(ids) < most:
        token = choose(np.flatnonzero(grammar.allowed(tokenizer.vocab_size + 64)))
        if token in tokenizer.eog_ids:
            return tokenizer.decode(ids), True
        ids.append(int(token))
        grammar.accept(int(token))
    return tokenizer.decode(ids), False


@pytest.mark.parametrize(
    "text, right",
    [
        ('{"a":1}', True),
        ('{"a": 1, "b":[1,2, {"c": null}]}', True),
        ('{\n  "a": 1\n}', True),
        ('{"a":"x\\n\\" é日本","b":[],"c":{},"d":-0.5e+3,"e":true}', True),
        ('{"a":1', False),
        ("{\n\n\n", None),
        ('{"a":1}\n', None),
        ('  {"a":1}', None),
        ('{"a":"x\ny"}', None),
        ("[1]", None),
        ('{"a":1,}', None),
        ("Sure", None),
    ],
)
def test_json_mode(compiler, tokenizer, text, right):
    assert follows(compiler, tokenizer, compiler.json_object(), text) is right


def test_b19_only_the_end_may_follow_a_closed_object(compiler, tokenizer):
    grammar = compiler.json_object()()
    closed = [grammar.accept(token) for token in tokenizer.encode('{"a":1}', bos=False)]
    assert closed[-1] and not any(closed[:-1])
    assert set(np.flatnonzero(grammar.allowed(tokenizer.vocab_size))) == tokenizer.eog_ids


@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "array", "items": {"type": "string"}}])
def test_b19_a_model_that_loves_blanks_makes_progress(compiler, tokenizer, schema):
    blanks = {i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).strip(b" \n\t\r") == b""}
    blanks -= tokenizer.eog_ids
    rng = random.Random(3)

    def blank_first(ids):
        loved = [i for i in ids if i in blanks]
        return max(loved) if loved else rng.choice(ids)

    text, _ = generate(tokenizer, compiler.json_schema(schema)(), blank_first, most=200)
    runs = [len(run) for run in re.findall(r"[ \n\t\r]+", text)]
    longest_token = max(len(tokenizer.token_bytes(i)) for i in blanks)
    assert max(runs) < MAX_BLANKS + longest_token and len(text.split()) > 5
    outside = re.sub(r'"[^"]*"?', "", text)
    assert max((len(run) for run in re.findall(r"\s+", outside)), default=0) <= 21


LINKED = {
    "$ref": "#/$defs/n",
    "$defs": {"n": {"type": "object", "properties": {"v": {"type": "number"}, "next": {"anyOf": [{"type": "null"},
      {"$ref": "#/$defs/n"}]}}, "required": ["v", "next"], "additionalProperties": False}},
}  # fmt: skip


@pytest.mark.parametrize("lead, before", [(None, ""), (Lead("</think>", "<think>"), '<think>[{ " </think>')])
def test_a_model_that_loves_digits_brackets_and_names_comes_to_an_end(compiler, tokenizer, lead, before):
    rng = random.Random(5)
    loved = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1] in b"0123456789{["]
    loved = {i for i in loved if tokenizer.token_bytes(i)}

    def choose(ids):
        return rng.choice([i for i in ids if i in loved] or list(ids))

    for schema, most in ((LINKED, 1500), ({"type": "number"}, 60), ({"type": "integer"}, 60)):
        grammar = compiler.json_schema(schema, lead)()
        for token in tokenizer.encode(before, bos=False):
            grammar.accept(token)
        text, done = generate(tokenizer, grammar, choose, most)
        assert done, text
        json.loads(text)
        assert max(map(len, re.findall(r"\d+", text))) < MAX_DIGITS + 8
        assert text.count("{") <= MAX_DEPTH + 1
    grammar = compiler.json_object(lead)()
    for token in tokenizer.encode(before + '{"', bos=False):
        grammar.accept(token)
    text, _ = generate(tokenizer, grammar, lambda ids: rng.choice([i for i in ids if i in loved] or list(ids)), 60)
    assert text.index('"') < MAX_NAME + 20


def test_place_in_json():
    place = JSONPlace().after(b'{"a\\"b": [1, -2.5e10, {"')
    assert (place.stack, place.in_string, place.is_name) == ("{[{", True, True)
    place = place.after(b'k": 123')
    assert (place.digits, place.is_name, place.in_string) == (3, False, False)
    assert JSONPlace().after(b"1.5e-12").in_exponent and JSONPlace().after(b"1e").in_exponent
    assert JSONPlace().after(b'["x  \\n ').blanks == 4
    assert JSONPlace().after(b'{"a": {}, "b').is_name and not JSONPlace().after(b'["a", "b').is_name


SCHEMAS = [
    ({"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 12}}, "required": ["n"],
      "additionalProperties": False}, lambda v: list(v) == ["n"] and 3 <= v["n"] <= 12),
    ({"enum": ["red", "green", 3, None]}, lambda v: v in ("red", "green", 3, None)),
    ({"const": {"a": [1]}}, lambda v: v == {"a": [1]}),
    ({"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{3}$"}, lambda v: re.fullmatch("[a-z]{2,5}-[0-9]{3}", v)),
    ({"type": "string", "maxLength": 8, "minLength": 2}, lambda v: 2 <= len(v) <= 8),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
     lambda v: 1 <= len(v) <= 4 and all(isinstance(x, bool) for x in v)),
    ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, lambda v: v is None or isinstance(v, bool)),
    ({"$ref": "#/$defs/p", "$defs": {"p": {"type": "object", "properties": {"x": {"type": "string", "maxLength": 5},
      "next": {"anyOf": [{"$ref": "#/$defs/p"}, {"type": "null"}]}}, "required": ["x", "next"],
      "additionalProperties": False}}}, lambda v: set(v) == {"x", "next"}),
    ({"type": "string", "format": "date"}, lambda v: re.fullmatch(r"\d{4}-\d{2}-\d{2}", v)),
    ({"type": "array", "prefixItems": [{"type": "integer", "maximum": 9, "minimum": 0}, {"enum": ["x"]}],
      "items": False, "minItems": 2}, lambda v: 0 <= v[0] <= 9 and v[1:] == ["x"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, lambda v: 0 < v <= 1),
    ({"type": ["string", "null"], "maxLength": 3}, lambda v: v is None or len(v) <= 3),
]  # fmt: skip


@pytest.mark.parametrize("schema, valid", SCHEMAS, ids=lambda p: json.dumps(p)[:40] if isinstance(p, dict) else "")
def test_whatever_ends_is_valid(compiler, tokenizer, schema, valid):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    factory = compiler.json_schema(schema)
    ended = 0
    for _ in range(20):
        text, done = generate(tokenizer, factory(), lambda ids: rng.choice(ids))
        if done:
            ended += 1
            assert valid(json.loads(text)), text
    assert ended >= 10


def test_regex_lark_and_gbnf(compiler, tokenizer):
    assert follows(compiler, tokenizer, compiler.regex(r"(yes|no)/\d+"), "yes/12") is True
    assert follows(compiler, tokenizer, compiler.regex(r"(yes|no)"), "maybe") is None
    assert follows(compiler, tokenizer, compiler.lark('start: "a" ("b" | "c")+'), "abcb") is True
    assert follows(compiler, tokenizer, compiler.lark('root ::= "x" [0-9]+ " end"?\n'), "x42 end") is True


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda c: c.json_schema({"type": "objec"}), "objec"),
        (lambda c: c.json_schema({"not": {"type": "string"}}), "not"),
        (lambda c: c.json_schema({"$ref": "#/nowhere"}), "nowhere"),
        (lambda c: c.json_schema("{nope"), "no JSON"),
        (lambda c: c.json_schema([1]), "object"),
        (lambda c: c.regex("(a"), "regex"),
        (lambda c: c.lark("start: nope"), "nope"),
        (lambda c: c.lark("root ::= [a"), "parse"),
        (lambda c: c.regex("a" * 300_000), "at most"),
    ],
)
def test_what_does_not_compile_says_why(compiler, make, reason):
    with pytest.raises(GrammarError, match=reason) as raised:
        make(compiler)
    assert "\n" not in str(raised.value)


def test_the_reason_is_all_that_is_said(compiler):
    with pytest.raises(GrammarError) as raised:
        compiler.json_schema({"type": "foo"})
    assert str(raised.value) == "the schema does not compile: Invalid type: foo"


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema, text, valid",
    [
        # What pydantic makes of a model with two fields; llama.cpp takes no third entry.
        (PERSON | {"required": ["name", "age"]}, '{"name": "A", "age": 3}', True),
        (PERSON | {"required": ["name", "age"]}, '{"name": "A", "age": 3, "x": 1}', False),
        (PERSON | {"additionalProperties": True}, '{"name": "A", "age": 3, "x": 1}', True),
        (PERSON | {"patternProperties": {"^x": {"type": "integer"}}}, '{"name": "A", "age": 3, "x": 1}', True),
        (PERSON | {"required": ["name", "x"]}, '{"name": "A", "age": 3, "x": 1}', True),
        ({"type": "array", "items": PERSON}, '[{"name": "A", "x": 1}]', False),
        ({"$ref": "#/$defs/p", "$defs": {"p": PERSON}}, '{"name": "A", "x": 1}', False),
        ({"anyOf": [{"type": "null"}, PERSON]}, '{"name": "A", "x": 1}', False),
        ({"allOf": [PERSON, {"properties": {"x": {"type": "integer"}}}]}, '{"name": "A", "age": 3, "x": 1}', True),
        ({"type": "object"}, '{"x": 1}', True),
        ({"enum": [{"properties": {"x": 1}}]}, '{"properties": {"x": 1}}', True),
    ],
)
def test_an_object_has_the_entries_that_its_schema_lists(compiler, tokenizer, schema, text, valid):
    assert (follows(compiler, tokenizer, compiler.json_schema(schema), text) is True) == valid


def test_roll_back(compiler, tokenizer):
    grammar = compiler.json_object()()
    ids = tokenizer.encode('{"key": [1, 2]}', bos=False)
    masks = []
    for token in ids:
        masks.append(grammar.allowed(tokenizer.vocab_size))
        grammar.accept(token)
    assert grammar.is_done
    grammar.roll_back(len(ids) - 2)
    for token, mask in zip(ids[2:], masks[2:], strict=True):
        assert (grammar.allowed(tokenizer.vocab_size) == mask).all()
        grammar.accept(token)
    assert grammar.is_done


def test_thinking_before_json(compiler, tokenizer):
    opened = compiler.json_object(Lead(closer="</think>"))
    assert follows(compiler, tokenizer, opened, 'so {} \n\n</think>\n\n{"a":1}') is True
    assert follows(compiler, tokenizer, opened, "so\n\n</think>\n\nHello") is None
    may = compiler.json_object(Lead(opener="<think>", closer="</think>"))
    assert follows(compiler, tokenizer, may, '<think>\nhm</think>{"a":1}') is True
    assert follows(compiler, tokenizer, may, '{"a":1}') is True
    assert follows(compiler, tokenizer, may, "Hello") is None
    markers = Lead(opener="<|im_start|>think", closer="<|im_end|><|im_start|>say", skip="<|im_start|>say")
    for_markers = compiler.regex("a+", markers)
    assert follows(compiler, tokenizer, for_markers, "<|im_start|>think\nx<|im_end|><|im_start|>sayaa", True) is True
    assert follows(compiler, tokenizer, for_markers, "<|im_start|>sayaa", True) is True
    assert follows(compiler, tokenizer, for_markers, "aa", True) is None
