"""Ids of seven real vocabularies, against the answers that came with them."""

from __future__ import annotations

import json

import pytest

from edgellm.tokenizer import from_gguf
from tests.tokenizer.shared import SHARED, VOCABS, answers, vocab_file


@pytest.mark.parametrize("name", VOCABS)
def test_all_ids_of_the_vocabulary(name):
    path = vocab_file(name)
    tokenizer = from_gguf(path)
    pairs = answers(path)
    assert len(pairs) == 47
    for text, ids in pairs:
        assert tokenizer.encode(text, bos=False) == ids, text
        if tokenizer.kind != "wordpiece":
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_probes_of_the_golden_models(name):
    folder = SHARED / "goldens" / name
    if not folder.exists():
        pytest.skip(f"{folder} is not here (set EDGELLM_SHARED)")
    tokenizer = from_gguf(folder / f"{name}-f16.gguf")
    probes = json.loads((folder / "meta.json").read_text())["tokens"]
    assert len(probes) == 4
    for probe in probes:  # equal in transformers and llama.cpp
        assert tokenizer.encode(probe["text"], bos=False) == probe["ids"]
