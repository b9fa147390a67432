"""SPM with Gemma's settings and Unigram with T5's, trained here: ids against the sentencepiece library itself."""

from __future__ import annotations

import random

import pytest

from edgellm.tokenizer import from_metadata
from tests.tokenizer.round_trip import check_round_trips, random_text
from tests.tokenizer.vocabs import changed, trained

TEXTS = [
    "",
    "Hello world",
    " Hello",
    "a  b   c",
    "\n\n\n\nx\ty",
    "def f(x):\n    return x ** 2",
    "12345 Zürich 日本語 приве́т",
    "🦙 ﬁ \0 \u0301",
    "<end_of_turn> <start_of_turn>user",
]


def in_library(text: str) -> bool:
    return "▁" not in text  # we spell it in bytes to get it back; the library makes it a space


@pytest.mark.parametrize("kind", ["spm", "unigram"])
def test_ids_equal_the_library(kind):
    library, metadata = trained(kind)
    tokenizer = from_metadata(metadata)
    rng = random.Random(7)
    texts = TEXTS + [random_text(rng, in_library) for _ in range(300)]
    texts += ["".join(rng.choices("abcdef gh\n\t.,", k=40)) for _ in range(200)]
    for text in texts:
        assert tokenizer.encode(text, bos=False) == library.encode(text), text


def test_b07_gemma_settings_keep_the_blank():
    _, metadata = trained("spm")
    tokenizer = from_metadata(metadata)
    assert tokenizer.encode("Hello", bos=False) != tokenizer.encode(" Hello", bos=False)
    turn = tokenizer.token_id("<start_of_turn>")
    plain = tokenizer.encode("user", bos=False)
    assert tokenizer.encode("<start_of_turn>user", special=True, bos=False) == [turn, *plain]
    assert turn not in tokenizer.encode("<start_of_turn>user")
    two_blanks = tokenizer.token_id("▁▁")
    assert two_blanks in tokenizer.encode("a  b") and tokenizer.token_bytes(two_blanks) == b"  "


@pytest.mark.parametrize("setting", [None, True])
def test_b07_space_prefix(setting):
    _, metadata = trained("spm")
    tokenizer = from_metadata(changed(metadata, add_space_prefix=setting))
    without = from_metadata(metadata)
    ids = tokenizer.encode("user", bos=False)
    assert ids == without.encode(" user", bos=False)
    # llama.cpp's rule: the prefix also goes behind a control token
    turn = tokenizer.token_id("<start_of_turn>")
    assert tokenizer.encode("<start_of_turn>user", special=True, bos=False) == [turn, *ids]
    for text in ("user", " user", "  user\n x ", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    first, more = ids[0], tokenizer.stream_decoder(after=turn)
    assert more.push(first) == tokenizer.token_bytes(first).decode().removeprefix(" ")
    assert tokenizer.stream_decoder(after=ids[-1]).push(first) == tokenizer.token_bytes(first).decode()


@pytest.mark.parametrize("prefix", [False, True])
def test_b08_random_unicode_comes_back(prefix):
    _, metadata = trained("spm")
    check_round_trips(from_metadata(changed(metadata, add_space_prefix=prefix)), random.randrange(2**32))


@pytest.mark.parametrize("run", ["A", "\n", "us", " ", ".", "漢", "▁", "<s"])
@pytest.mark.parametrize("kind", ["spm", "unigram"])
def test_b09_long_runs(kind, run):
    _, metadata = trained(kind)
    tokenizer = from_metadata(metadata)
    text = run * (100_000 // len(run))
    ids = tokenizer.encode(text)
    assert kind == "unigram" or tokenizer.decode(ids) == text


def test_b10_exactly_one_bos():
    _, metadata = trained("spm")
    tokenizer = from_metadata(metadata)
    assert tokenizer.add_bos and tokenizer.bos_id == 2
    for text, special in (("Hi", False), ("Hi", True), ("<s>Hi", True)):
        assert tokenizer.encode(text, special=special)[:2].count(2) == 1
    assert tokenizer.encode("<s>Hi").count(2) == 1  # its text, behind the BOS that is added
    assert 2 not in tokenizer.encode("Hi", bos=False)


def test_b11_end_tokens():
    _, metadata = trained("spm")
    tokenizer = from_metadata(metadata)
    assert tokenizer.eog_ids == {1, tokenizer.token_id("<end_of_turn>")}
    assert tokenizer.decode([*tokenizer.encode("Hi", bos=False), *tokenizer.eog_ids]) == "Hi"


def test_unigram_ends_with_eos():
    _, metadata = trained("unigram")
    tokenizer = from_metadata(metadata)
    assert tokenizer.encode("Hi") == [*tokenizer.encode("Hi", bos=False), tokenizer.eos_id]
    assert not tokenizer.add_bos
    assert tokenizer.decode(tokenizer.encode("Hello  world ")) == "Hello world"  # T5 drops extra blanks


def test_vocabulary_without_byte_tokens_or_with_odd_types():
    _, metadata = trained("spm")
    types = [1 if kind == 6 else kind for kind in metadata["tokenizer.ggml.token_type"]]
    types[10] = 2  # a second unknown token, as in Phi-3's file
    pieces = list(metadata["tokenizer.ggml.tokens"])
    pieces[700], pieces[701] = "", pieces[699]
    tokenizer = from_metadata(changed(metadata, token_type=types, tokens=pieces))
    assert tokenizer.decode(tokenizer.encode("def f(x)")) == "def f(x)"
