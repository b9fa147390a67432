"""B06: damaged and odd tokenizer metadata. Each error names the key."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from edgellm.errors import TokenizerError
from edgellm.tokenizer import from_metadata
from tests.tokenizer.vocabs import changed, smollm2, trained


def test_b06_pre_absent_warns_once_and_splits_by_the_default_rule(caplog):
    with caplog.at_level(logging.WARNING, "edgellm"):
        tokenizer = from_metadata(smollm2(pre=None))
        assert tokenizer.encode("a (b)") == [81, 216, 24, 82, 25]  # llama.cpp's ids for its default rule
    assert [r for r in caplog.records if "tokenizer.ggml.pre" in r.getMessage()] == caplog.records
    assert len(caplog.records) == 1
    assert from_metadata(smollm2()).encode("a (b)") == [81, 365, 82, 25]


def test_b06_unknown_pre_is_an_error_that_names_it():
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre is 'no-such-pre'"):
        from_metadata(smollm2(pre="no-such-pre"))


@pytest.mark.parametrize("value", [49152, 2**31, -5, "2", 1.0, True])
def test_b06_eos_outside_the_vocabulary(value):
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.eos_token_id"):
        from_metadata(smollm2(eos_token_id=value))


def test_b06_repeated_token_text_first_id_wins(caplog):
    tokens = list(smollm2()["tokenizer.ggml.tokens"])
    tokens[40000] = tokens[19556]
    tokenizer = from_metadata(smollm2(tokens=tokens))
    assert tokenizer.encode("Hello") == [19556]
    assert tokenizer.decode([40000]) == "Hello"
    assert "repeated" in caplog.text


@pytest.mark.parametrize("entry", ["ab", "", "a", "a ", " "])
def test_b06_merge_without_two_pieces(entry):
    merges = list(smollm2()["tokenizer.ggml.merges"])
    merges[7] = entry
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.merges entry 7"):
        from_metadata(smollm2(merges=merges)).encode("x")


@pytest.mark.parametrize("key", ["scores", "token_type"])
def test_b06_arrays_of_the_wrong_length(key):
    _, metadata = trained("spm")
    short = metadata[f"tokenizer.ggml.{key}"][:-1]
    with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.{key} has 899 entries for 900 tokens"):
        from_metadata(changed(metadata, **{key: short}))


@pytest.mark.parametrize("metadata", [smollm2(add_bos_token=True), trained("spm")[1]], ids=["bpe", "spm"])
def test_b06_add_bos_without_a_bos_id(metadata):
    with pytest.raises(TokenizerError, match=r"add_bos_token is true, but tokenizer\.ggml\.bos_token_id is absent"):
        from_metadata(changed(metadata, bos_token_id=None))


@pytest.mark.parametrize("key", ["add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces"])
def test_flags_are_true_or_false(key):
    metadata = trained("spm")[1]
    for value in ("false", 0.5, 2, []):
        with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.{key} must be true or false, not"):
            from_metadata(changed(metadata, **{key: value}))
    false, zero = (from_metadata(changed(metadata, **{key: value})).encode("Hi  x") for value in (False, 0))
    assert false == zero


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.int8])
def test_b06_token_types_of_any_integer_kind(dtype):
    types = np.array(smollm2()["tokenizer.ggml.token_type"], dtype)
    tokenizer = from_metadata(smollm2(token_type=types))
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.is_control(2) and not tokenizer.is_control(905)


def test_merges_absent_or_of_pieces_outside_the_vocabulary(caplog):
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.merges is absent"):
        from_metadata(smollm2(merges=None)).encode("x")
    merges = [*smollm2()["tokenizer.ggml.merges"], "nosuchpiece Ġthe"]
    assert from_metadata(smollm2(merges=merges)).encode("Hello world") == [19556, 905]
    assert "1 entries join pieces outside" in caplog.text


def test_model_absent_or_unknown():
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.model is absent"):
        from_metadata({})
    with pytest.raises(TokenizerError, match="'rwkv'"):
        from_metadata(smollm2(model="rwkv"))
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.tokens"):
        from_metadata(smollm2(tokens=[]))


VALUES = (None, 0, -1, 2**63, 1.5, True, "x", "", [], [None], ["a"] * 900, [0] * 900, [float("nan")] * 900, {})
VALUES += (["\udc80"] * 900, [str(i) for i in range(900)], [6] * 900, [3] * 900, [""] * 900)


def test_any_value_of_any_key_works_or_is_a_one_line_error():
    _, metadata = trained("spm")
    for key in metadata:
        for value in VALUES:
            try:
                tokenizer = from_metadata(metadata | {key: value})
                ids = tokenizer.encode("Hi <s> wörld  \n\n ▁ 🦙", special=True)
            except TokenizerError as error:
                assert "\n" not in str(error)
                continue
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
            tokenizer.decode(range(tokenizer.vocab_size), special=True)
