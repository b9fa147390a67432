"""Real vocabularies that are too big to ship: gemma-3's (SPM) from its model file, the BERT one, gemma4's kind."""

from __future__ import annotations

import random

import pytest

from edgellm.loader import open_gguf
from edgellm.tokenizer import from_gguf, from_metadata
from tests.support.real import real_model
from tests.tokenizer.round_trip import check_round_trips
from tests.tokenizer.shared import vocab_file
from tests.tokenizer.vocabs import changed, trained

GOLDEN = {  # cases.md; checked with llama.cpp
    "Hello": [9259],
    " Hello": [26352],
    "Hello world": [9259, 1902],
    "🦙": [478, 397, 404, 391],
    "🤗": [242352],
    "\U0001fae8": [478, 397, 409, 406],
    "<end_of_turn>": [236820, 643, 236779, 1340, 236779, 887, 236813],
    "\n\n": [108],
    "  ": [138],
    "   ": [139],
    "a  b": [236746, 138, 236763],
}


@pytest.fixture(scope="module")
def gemma():
    return from_gguf(real_model("gemma3-270m.gguf"))


@pytest.mark.real
def test_b07_b08_b11_gemma(gemma):
    for text, ids in GOLDEN.items():
        assert gemma.encode(text, bos=False) == ids
        assert gemma.decode(ids) == text
    assert gemma.encode("Hello") == [2, 9259]
    assert gemma.encode("<bos>Hello", special=True) == [2, 9259]
    assert gemma.encode("<start_of_turn>user", special=True) == [2, 105, 2364]
    assert gemma.eog_ids == {1, 106}
    check_round_trips(gemma, random.randrange(2**32))


def test_bert_wraps_in_cls_and_sep():
    bert = from_gguf(vocab_file("bert-bge"))
    assert bert.encode("Hello world") == [101, 7592, 2088, 102]
    assert bert.encode("Hello world", bos=False) == [7592, 2088]
    assert bert.decode([101, 7592, 2088, 102]) == "hello world"
    assert bert.encode("x" * 101, bos=False) == [100]


def gemma4_metadata():
    """BPE over SentencePiece-style pieces, made of the trained SPM vocabulary: each piece merges from its halves."""
    _, metadata = trained("spm")
    pieces = metadata["tokenizer.ggml.tokens"]
    known = set(pieces)
    merges = [
        f"{piece[:k]} {piece[k:]}"
        for piece, kind in zip(pieces, metadata["tokenizer.ggml.token_type"], strict=True)
        for k in range(1, len(piece))
        if kind == 1 and piece[:k] in known and piece[k:] in known
    ]
    return changed(metadata, model="gemma4", pre=None, scores=None, add_space_prefix=None, merges=merges)


def test_gemma4_kind():
    tokenizer = from_metadata(gemma4_metadata())
    assert tokenizer.add_bos
    ids = tokenizer.encode("def  f(x):\n\n\treturn 🦙▁", bos=False)
    assert tokenizer.decode(ids) == "def  f(x):\n\n\treturn 🦙▁"
    assert [tokenizer.tokens[i] for i in ids[-7:-3]] == [f"<0x{b:02X}>" for b in "🦙".encode()]
    assert tokenizer.token_id("\n\n") in ids and tokenizer.token_id("▁▁") in ids
    check_round_trips(tokenizer, random.randrange(2**32))
    long = "us" * 50_000
    assert tokenizer.decode(tokenizer.encode(long)) == long


PHI3 = {  # llama.cpp's ids for a file with this name
    "<|endoftext|> a": [32000, 29871, 263],
    "<|end|> \n a": [32007, 263],
    "<unk> a": [0, 29871, 263],
    "<|user|>\nHi<|end|>\n<|assistant|>\n": [32010, 6324, 32007, 32001],
}


def test_phi3_markers_swallow_blanks_behind_them_but_for_three():
    with open_gguf(vocab_file("phi-3")) as file:
        phi = from_metadata(dict(file.metadata) | {"general.name": "Phi-3 Mini"})
        assert {text: phi.encode(text, special=True, bos=False) for text in PHI3} == PHI3
