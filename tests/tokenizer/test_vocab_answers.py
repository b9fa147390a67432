"""Ids of seven real vocabularies, against the answers that came with them."""

from __future__ import annotations

import pytest

from edgellm.tokenizer import from_gguf
from tests.tokenizer.shared import VOCABS, answers, vocab_file


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
