"""Embeddings: the encoder against transformers, and what a vector must hold whatever its batch mates are (B34)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm import LLM, SamplingParams
from edgellm.errors import ContextLengthError, EdgeLLMError, RequestError
from tests.support.goldens import DATA, ENCODERS, Golden
from tests.support.tiny import tiny_gguf

BERT = Golden("bert", DATA / "goldens")


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def encoder() -> Iterator[LLM]:
    with LLM(BERT.path()) as llm:
        yield llm


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "qwen3"), ctx=64) as llm:
        yield llm


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_equals_transformers(name: str, backend: str) -> None:
    golden = Golden(name, DATA / "goldens")
    expected = [unit(golden.z[f"hidden_{i}"].mean(axis=0)) for i in range(3)]
    with LLM(golden.path(), backend=backend, kv_type="f32") as llm:
        found = llm.embed([golden.ids(i) for i in range(3)])
    assert found.shape == (3, 64)
    assert np.abs(found - expected).max() < 1e-5


def test_encoder_does_not_generate(encoder: LLM) -> None:
    with pytest.raises(EdgeLLMError, match="bert models embed texts"):
        encoder.generate([BERT.ids(1)], SamplingParams(max_tokens=4))
    assert encoder.embed([BERT.ids(1)]).shape == (1, 64)


def test_decoder_gives_the_last_row_of_its_hidden_states(decoder: LLM) -> None:
    """Through the output head the vector must give the logits of the last position, up to its length."""
    ids = list(range(20, 50))
    vector = decoder.embed([ids])[0].astype(np.float64)
    model = decoder.engine.runner.model
    head = np.ascontiguousarray(model.token_embd.tensor.data).view(np.float16).astype(np.float64)
    assert np.corrcoef(head @ vector, decoder.logits(ids)[-1])[0, 1] > 0.9999


@pytest.mark.parametrize("which", ["encoder", "decoder"])
def test_b34_vectors_do_not_depend_on_their_batch(which: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(which)
    rng = np.random.default_rng(1)
    rows = [rng.integers(5, 270, n).tolist() for n in rng.integers(1, 60, 64)]
    together = llm.embed(rows)
    assert together.shape == (64, llm.config.dim) and np.isfinite(together).all()
    assert np.abs(np.linalg.norm(together, axis=1) - 1).max() < 1e-3
    for i in (0, 7, 31, 63):
        assert np.array_equal(llm.embed([rows[i]])[0], together[i])
    assert np.array_equal(llm.embed(rows[::-1]), together[::-1])


def test_b34_empty_texts_and_lists(decoder: LLM) -> None:
    vectors = decoder.embed(["a", "", "b"])
    assert vectors.shape == (3, 64) and np.isfinite(vectors).all()
    assert np.array_equal(vectors[0], decoder.embed(["a"])[0]) and np.array_equal(vectors[2], decoder.embed(["b"])[0])
    assert decoder.embed([]).shape == (0, 64)


def test_b34_too_long_is_cut_to_the_context_or_refused(decoder: LLM) -> None:
    ids = [(7 * i) % 250 + 5 for i in range(200)]
    assert np.array_equal(decoder.embed([ids])[0], decoder.embed([ids[:64]])[0])
    with pytest.raises(ContextLengthError) as error:
        decoder.embed([ids], truncate=False)
    assert (error.value.n_prompt, error.value.n_ctx) == (200, 64)


def test_context_ends_with_the_table_of_positions() -> None:
    """No row of the table, no position: neither garbage nor a crash."""
    for path in (BERT.path(), Golden("gpt2", DATA / "goldens").path()):
        with pytest.raises(RequestError, match=r"knows \d+ positions: a context of 5000 cannot be computed"):
            LLM(path, ctx=5000)


def test_pooling_of_the_file_is_used(tmp_path: Path) -> None:
    ids = list(range(20, 40))
    mean = tiny_gguf(tmp_path / "mean.gguf", "llama", metadata={"llama.pooling_type": 1})
    last = tiny_gguf(tmp_path / "last.gguf", "llama", metadata={"llama.pooling_type": 3})
    first = tiny_gguf(tmp_path / "cls.gguf", "llama", metadata={"llama.pooling_type": 2})
    with LLM(mean, backend="reference") as a, LLM(last, backend="reference") as b, LLM(first, backend="reference") as c:
        assert a.config.pooling == "mean" and b.config.pooling == "last" and c.config.pooling == "cls"
        assert np.allclose(c.embed([ids])[0], c.embed([ids[:1]])[0], atol=1e-5)
        assert np.allclose(b.embed([ids])[0], b.embed([ids[:-1], ids])[1], atol=1e-5)
        assert np.abs(a.embed([ids])[0] - b.embed([ids])[0]).max() > 0.01
