"""What is refused, and with which words; a tiny file of every architecture loads and runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgellm.backends import create
from edgellm.errors import UnsupportedModel
from edgellm.loader import open_gguf
from edgellm.models.registry import SUPPORTED, config_from_metadata, load_model
from edgellm.quants import GGMLType, QTensor
from tests.support.goldens import ENCODERS
from tests.support.models import Runner
from tests.support.tiny import tiny_gguf

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["a"] * 300,
}


@pytest.mark.parametrize("arch", [arch for arch in SUPPORTED if arch not in ENCODERS])
def test_tiny_file_of_every_decoder_runs(arch: str, tmp_path: Path) -> None:
    backend = create("reference")
    model = load_model(open_gguf(tiny_gguf(tmp_path / "tiny.gguf", arch)), backend)
    run = Runner(model, backend)
    ids = list(range(10, 50))
    whole = run.logits(ids)
    assert whole.shape == (40, 300) and np.isfinite(whole).all()
    run.position = 0
    parts = np.concatenate([run.run(ids[:7]), run.run(ids[7:33]), run.run(ids[33:])])
    assert np.abs(parts - whole).max() < 1e-4 * np.abs(whole).max()


def test_unknown_architecture_is_named_with_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel) as error:
        config_from_metadata({"general.architecture": "mamba9"})
    assert "'mamba9'" in str(error.value) and "llama" in str(error.value)
    assert "\n" not in str(error.value)


def test_no_architecture_at_all() -> None:
    with pytest.raises(UnsupportedModel, match=r"general\.architecture"):
        config_from_metadata({})


@pytest.mark.parametrize(
    "key,value",
    [
        ("llama.block_count", None),
        ("llama.block_count", 0),
        ("llama.block_count", "2"),
        ("llama.block_count", 1 << 40),
        ("llama.embedding_length", True),
        ("llama.attention.head_count", 5),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.head_count_kv", [4, 2]),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.rope.dimension_count", 15),
        ("llama.rope.dimension_count", 18),
        ("llama.rope.freq_base", -1.0),
        ("llama.rope.scaling.type", "spiral"),
        ("llama.context_length", None),
    ],
)
def test_wrong_value_names_its_key(key: str, value: object) -> None:
    metadata = {k: v for k, v in {**LLAMA, key: value}.items() if v is not None}
    with pytest.raises(UnsupportedModel) as error:
        config_from_metadata(metadata)
    assert key in str(error.value) and "\n" not in str(error.value)


def test_equal_per_layer_values_are_one_value() -> None:
    assert config_from_metadata({**LLAMA, "llama.attention.head_count_kv": [2, 2]}).n_kv_heads == 2


def load_changed(path: Path, change: Any) -> None:
    gguf = open_gguf(tiny_gguf(path, "llama"))
    tensors = dict(gguf.tensors)
    change(tensors)
    load_model(SimpleNamespace(metadata=gguf.metadata, tensors=tensors), create("reference"))  # type: ignore[arg-type]


def test_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tensor blk\.1\.ffn_up\.weight is missing.* 96 x 64"):
        load_changed(tmp_path / "t.gguf", lambda t: t.pop("blk.1.ffn_up.weight"))


def test_wrong_shape_is_named_expected_and_found(tmp_path: Path) -> None:
    wrong = QTensor("", GGMLType.F32, (64, 32), np.zeros((64, 128), np.uint8))
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.weight has shape 64 x 32, expected 64 x 64"):
        load_changed(tmp_path / "t.gguf", lambda t: t.update({"blk.0.attn_q.weight": wrong}))


def test_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    extra = QTensor("", GGMLType.F32, (1,), np.zeros(4, np.uint8))
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.scale has no place"):
        load_changed(tmp_path / "t.gguf", lambda t: t.update({"blk.0.attn_q.scale": extra}))


def test_tiny_file_is_the_same_twice(tmp_path: Path) -> None:
    first = tiny_gguf(tmp_path / "a.gguf", quant="Q8_0").read_bytes()
    assert first == tiny_gguf(tmp_path / "b.gguf", quant="Q8_0").read_bytes()
