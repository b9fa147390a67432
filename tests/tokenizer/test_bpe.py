"""Byte-level BPE: B08 to B11 on SmolLM2's vocabulary; ids from cases.md, which were checked with llama.cpp."""

from __future__ import annotations

import random

import pytest

from edgellm.errors import RequestError
from edgellm.tokenizer import from_metadata
from edgellm.tokenizer.pre import RULES
from tests.tokenizer.round_trip import check_round_trips
from tests.tokenizer.vocabs import changed, smollm2

GOLDEN = {
    "Hello world": [19556, 905],
    "12345": [33, 34, 35, 36, 37],
    "🦙": [10813, 116, 243],
    "🤗": [10813, 114, 241],
    "日本": [23274, 115, 40993],
    "<|im_end|>": [44, 108, 306, 79, 486, 108, 46],
    "<|im_start|>": [44, 108, 306, 79, 3738, 108, 46],
    "A" * 20: [44843, 44843, 26024],
}


@pytest.fixture(scope="module")
def tokenizer():
    return from_metadata(smollm2())


@pytest.mark.parametrize("text", GOLDEN)
def test_b08_golden_ids(tokenizer, text):
    assert tokenizer.encode(text) == GOLDEN[text]
    assert tokenizer.decode(GOLDEN[text]) == text


# Bytes that SmolLM2's vocabulary does not have: nothing can bring characters back that need them.
LACKING = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


def test_b08_random_unicode_comes_back(tokenizer):
    check_round_trips(tokenizer, random.randrange(2**32), lambda c: LACKING.isdisjoint(c.encode()))


def test_b08_characters_the_vocabulary_cannot_spell(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\x04b\U00050000c")) == "a\ufffdb\ufffdc"


@pytest.mark.parametrize("text", ["\0", "\u0301", "ﬁ", "ع\u200dع", "▁ ▁▁", "\ufeff", "\ufffd"])
def test_b08_odd_characters(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


RUNS = ["A", "\n", "us", " ", ".", "漢", "1", "<|", "\r\n", "a\u0301"]


@pytest.mark.parametrize("run", RUNS)
def test_b09_long_runs(tokenizer, run):
    # A backtracking or quadratic splitter takes minutes or the stack here; the suite's time shows it.
    text = run * (100_000 // len(run)) + "x"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-4o", "superbpe", "tiny_aya", "exaone-moe"])
def test_b09_long_runs_under_other_rules(pre):
    tokenizer = from_metadata(smollm2(pre=pre))
    for run in RUNS:
        text = run * (20_000 // len(run)) + "x"
        assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


@pytest.mark.parametrize("merges", [[], ["æĹ ¥", "¥ æ"]], ids=["as it is", "merges across letters"])
def test_long_cjk_runs_are_cut_without_changing_ids(merges):
    rng = random.Random(1)
    tokens, known = list(smollm2()["tokenizer.ggml.tokens"]), smollm2()["tokenizer.ggml.merges"]
    tokens[400:402] = ["æĹ¥", "¥æ"]  # two tokens whose second crosses from one letter to the next
    tokenizer = from_metadata(smollm2(tokens=tokens, merges=[*merges, *known]))
    run = "".join(chr(rng.choice([rng.randrange(0x4E00, 0x9FFF), rng.randrange(0x3040, 0x30FF)])) for _ in range(6000))
    text = f"a {run}日本日日 b"
    library = tokenizer._encoder._tokenizer
    assert len(list(tokenizer._encoder._cut(text))) > 2
    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_b10_bos_only_where_the_model_adds_it(tokenizer):
    assert tokenizer.add_bos is False
    assert tokenizer.encode("Hello") == [19556]
    assert tokenizer.encode("Hello", bos=True) == [1, 19556]
    adding = from_metadata(smollm2(add_bos_token=True))
    assert adding.encode("Hello") == [1, 19556]
    assert adding.encode("<|im_start|>Hello", special=True) == [1, 19556]
    assert adding.encode("Hello", bos=False) == [19556]


def test_b11_end_tokens_by_id_and_by_name(tokenizer):
    assert tokenizer.eog_ids == {0, 2, 4}  # <|endoftext|>, <|im_end|>, and as in llama.cpp <reponame>
    harmony = [*smollm2()["tokenizer.ggml.tokens"]]
    harmony[3:6] = ["<|return|>", "<|call|>", "<|end|>"]
    assert from_metadata(smollm2(tokens=harmony)).eog_ids == {0, 2, 3, 4}  # `<|end|>` only closes a channel there


def test_b11_control_tokens_are_no_text(tokenizer):
    assert tokenizer.decode([19556, 0, 905, 2]) == "Hello world"
    assert tokenizer.decode([19556, 2], special=True) == "Hello<|im_end|>"
    assert tokenizer.stream_decoder().push(2) == ""
    assert tokenizer.stream_decoder(show={2}).push(2) == "<|im_end|>"


def test_special_parsing_is_asked_for(tokenizer):
    text = "<|im_start|>user\nHi<|im_end|>"
    ids = tokenizer.encode(text, special=True)
    assert ids == [1, 4093, 198, 26843, 2]
    assert not set(tokenizer.encode(text)) & {1, 2}


def test_b14_characters_split_over_tokens(tokenizer):
    decoder = tokenizer.stream_decoder()
    assert [decoder.push(i) for i in (10813, 116, 243)] == ["", "", "🦙"]
    cut = tokenizer.stream_decoder()
    assert [cut.push(10813), cut.push(116), cut.finish()] == ["", "", "\ufffd"]
    broken = tokenizer.stream_decoder()
    assert broken.push(10813) + broken.push(19556) + broken.finish() == "\ufffdHello"
    assert tokenizer.decode([10813, 116]) == "\ufffd" and tokenizer.decode([10813, 19556]) == "\ufffdHello"


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("ab\ud800c")


def test_user_defined_tokens_are_matched_always_markers_never():
    tokens, types = (list(smollm2()[f"tokenizer.ggml.{k}"]) for k in ("tokens", "token_type"))
    tokens[300], tokens[301], types[300], types[301] = "<think>", "<｜User｜>", 4, 4
    tokenizer = from_metadata(smollm2(tokens=tokens, token_type=types))
    assert tokenizer.encode("a<think>b") == [81, 300, 82]
    assert 301 not in tokenizer.encode("<｜User｜>")  # DeepSeek's turn markers, often not marked as control tokens
    assert tokenizer.encode("<｜User｜>", special=True) == [301]
    assert tokenizer.decode([81, 300, 82]) == "a<think>b"


@pytest.mark.parametrize("pre", {rule: name for name, rule in RULES.items() if not rule.raw}.values())
def test_every_splitting_rule_compiles_and_loses_nothing(pre):
    tokenizer = from_metadata(smollm2(pre=pre))
    text = "I'll say 12345 ½ words, ДА! 日本語ひらがな\r\n\n\t x  \u3000y e\u0301 <b>(a+b)</b> iPhone's   "
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


def words(pre: str, text: str) -> list[str]:
    """How a rule cuts, seen through a vocabulary of bytes and every piece of the text."""
    letters = [smollm2()["tokenizer.ggml.tokens"][i] for i in range(17, 17 + 256)]
    parts = {text[i:j] for i in range(len(text)) for j in range(i + 2, len(text) + 1)}
    whole = [part.replace(" ", "Ġ") for part in parts]
    merges = [f"{w[:k]} {w[k:]}" for w in sorted(whole, key=len) for k in range(1, len(w))]
    metadata = changed(smollm2(), tokens=[*letters, *whole], token_type=None, merges=merges, pre=pre)
    for name in ("bos", "eos", "unknown", "padding"):
        metadata.pop(f"tokenizer.ggml.{name}_token_id")
    tokenizer = from_metadata(metadata)
    return [tokenizer.decode([i]) for i in tokenizer.encode(text, bos=False)]


@pytest.mark.parametrize(
    "pre, text, expected",
    [
        ("gpt-2", "12345 ab", ["12345", " ab"]),
        ("smollm", "123 ab", ["1", "2", "3", " ab"]),
        ("llama-bpe", "12345", ["123", "45"]),
        ("glm5", "12345", ["123", "45"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("superbpe", "1234567", ["1", "234", "567"]),
        ("superbpe", "123456", ["123", "456"]),
        ("tiny_aya", "1234 12", ["1", "234", " ", "12"]),
        ("tiny_aya", "1234a", ["123", "4", "a"]),
        ("falcon", "1234 a.b", ["123", "4", " a", ".", "b"]),
        ("gpt-4o", "aB Cd", ["a", "B", " Cd"]),
        ("tekken", "iPhone", ["i", "Phone"]),
        ("deepseek-v3", "a=bc", ["a", "=bc"]),
        ("bloom", "a,b", ["a", ",", "b"]),
        ("ufakzeka", "I'll", ["I", "'ll"]),
        ("poro-chat", " a b", [" a", " b"]),
        ("jais-2", "a    b", ["a", "  ", " ", " b"]),
    ],
)
def test_words_of_a_rule(pre, text, expected):
    assert words(pre, text) == expected


def test_mmbert_has_raw_pieces():
    """ModernBERT over Gemma's pieces: blanks are `▁`, and only line ends cut (llama.cpp gives these ids)."""
    tokens = ["<unk>", "a", "b", "▁", "\n", "▁a", "▁a▁b"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "mmbert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["▁ a", "▁a ▁b", "▁ b"],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    assert from_metadata(metadata).encode(" a b a\n a") == [5, 3, 2, 5, 4, 5]
