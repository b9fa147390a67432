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
from edgellm.models.rope import rope_spec
from edgellm.quants import GGMLType, QTensor
from tests.support.goldens import DATA, ENCODERS, Golden
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


@pytest.mark.parametrize(
    "key,variant,neutral",
    [
        ("expert_gating_func", 2, 1),
        ("expert_weights_scale", 2.5, 1.0),
        ("expert_group_count", 8, 1),
        ("attention.clamp_kqv", 8.0, 0.0),
        ("attention.kv_lora_rank", 512, 0),
        ("leading_dense_block_count", 1, 0),
    ],
)
def test_what_no_class_computes_is_refused(key: str, variant: float, neutral: float) -> None:
    assert config_from_metadata({**LLAMA, f"llama.{key}": neutral}) == config_from_metadata(LLAMA)
    with pytest.raises(UnsupportedModel, match=rf"llama\.{key} = {variant:g}: a variant of llama"):
        config_from_metadata({**LLAMA, f"llama.{key}": variant})


def test_a_decoder_that_sees_later_tokens_is_refused() -> None:
    """llama.cpp reads the key in every architecture; with the mask of a decoder all numbers would be wrong."""
    assert config_from_metadata({**LLAMA, "llama.attention.causal": True}) == config_from_metadata(LLAMA)
    for arch in ("llama", "qwen2", "gemma3"):
        with pytest.raises(UnsupportedModel, match=rf"{arch}\.attention\.causal = false: a variant of {arch}"):
            config_from_metadata(as_arch(arch, attention__causal=False))
    for arch in ("bert", "eurobert", "llama-embed", "modern-bert", "nomic-bert", "gemma-embedding"):
        assert not config_from_metadata(as_arch(arch, attention__causal=False)).causal


def test_layers_that_guess_further_tokens_are_skipped_knowingly() -> None:
    """GLM 4.5's files count them among the blocks; without the count their tensors have no place."""
    gguf = open_gguf(Golden("glm4moe", DATA / "goldens").path())
    head = QTensor("", GGMLType.F32, (64, 128), np.zeros((64, 512), np.uint8))
    tensors = {**gguf.tensors, "blk.2.nextn.eh_proj.weight": head, "blk.2.attn_norm.weight": head}
    counted = {**gguf.metadata, "glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    for metadata in (counted, gguf.metadata):
        opened: Any = SimpleNamespace(metadata=metadata, tensors=tensors)
        if metadata is counted:
            config = load_model(opened, create("reference")).config
            assert (config.n_layers, config.skipped_layers) == (2, 1)
        else:
            with pytest.raises(UnsupportedModel, match=r"blk\.2\.\S+ has no place in our glm4moe architecture"):
                load_model(opened, create("reference"))
    with pytest.raises(UnsupportedModel, match="nextn_predict_layers must be a whole number from 0 to 1"):
        config_from_metadata({**LLAMA, "llama.nextn_predict_layers": 2})


@pytest.mark.parametrize("groups,used,fits", [(4, 2, True), (1, 0, True), (3, 2, False), (8, 4, False), (4, 1, False)])
def test_groups_of_experts_must_hold_the_chosen(groups: int, used: int, fits: bool) -> None:
    keys = {"expert_count": 8, "expert_used_count": 3, "expert_group_count": groups, "expert_group_used_count": used}
    metadata = as_arch("dots1", **keys)
    if fits:
        c = config_from_metadata(metadata)
        assert (c.expert_groups, c.expert_groups_used) == (groups, used or 1)
    else:
        with pytest.raises(UnsupportedModel, match=r"dots1\.expert_group_count \(\d, \d used\) does not fit 8 experts"):
            config_from_metadata(metadata)


def as_arch(arch: str, **more: Any) -> dict[str, Any]:
    """LLAMA's keys under another architecture's name."""
    renamed = {k.replace("llama.", f"{arch}."): v for k, v in LLAMA.items()}
    norm = {f"{arch}.attention.layer_norm_epsilon": 1e-5, "general.architecture": arch}
    return renamed | norm | {f"{arch}.{k.replace('__', '.')}": v for k, v in more.items()}


def test_constants_that_a_file_may_leave_to_its_architecture() -> None:
    """As llama.cpp's loader fills them in."""
    assert config_from_metadata(as_arch("gemma2")).windows == (4096, 0)
    assert config_from_metadata(as_arch("gemma3")).windows == ()
    assert config_from_metadata(as_arch("exaone4", block_count=64)).windows[:5] == (4096, 4096, 4096, 0, 4096)
    assert config_from_metadata(as_arch("exaone4")).windows == ()
    first = config_from_metadata(as_arch("minicpm"))
    assert (first.embedding_scale, first.residual_scale) == (12.0, 1.4 / 2**0.5)
    assert first.logit_scale == 256 / 64
    for arch in ("qwen2moe", "qwen3moe"):
        moe = as_arch(arch, expert_count=8, expert_used_count=4)
        assert config_from_metadata(moe).expert_ffn_dim == 96 // 4


def test_an_original_context_of_0_is_the_trained_one() -> None:
    """As in llama.cpp, which takes the key's 0 for "not said"."""
    for said in ({}, {"rope__scaling__original_context_length": 0}):
        assert config_from_metadata(as_arch("llama", rope__scaling__type="yarn", **said)).rope.original_context == 256


def test_windowed_layers_rotate_with_their_own_base() -> None:
    for arch in ("cohere2", "exaone4", "gemma2", "gpt-oss"):
        keys = {"attention__sliding_window": 8, "rope__scaling__type": "linear", "rope__scaling__factor": 2.0}
        keys |= {"expert_count": 4, "expert_used_count": 2} if arch == "gpt-oss" else {}
        assert config_from_metadata(as_arch(arch, **keys)).rope_local is None
        local = config_from_metadata(as_arch(arch, **keys, rope__freq_base_swa=500.0)).rope_local
        assert local is not None and (local.base, local.factor) == (500.0, 2.0)


def test_yarn_in_latent_attention() -> None:
    """Where q and k are turned and how far scores are stretched, as transformers has it (`_compute_yarn_parameters`,
    `yarn_apply_mscale`): with mscale_all_dim on the scores only, without it on the turned part only."""
    keys = {"attention__kv_lora_rank": 32, "rope__dimension_count": 8, "rope__scaling__type": "yarn"}
    yarn = {"rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
    usual = 0.1 * np.log(4) + 1
    plain = config_from_metadata(as_arch("deepseek2", **keys, **yarn))
    assert plain.attn_scale == pytest.approx(16**-0.5)
    assert rope_spec(plain.rope).magnitude[0] == pytest.approx(usual)
    both = config_from_metadata(as_arch("deepseek2", **keys, **yarn, rope__scaling__yarn_log_multiplier=0.1))
    assert both.attn_scale == pytest.approx(16**-0.5 * usual**2)
    assert rope_spec(both.rope).magnitude[0] == pytest.approx(1)


def test_gemma3_files_by_ollama_s_converter() -> None:
    """`gemma3:1b` of Ollama's registry names its bases so (convert_gemma3.go); read as 10000 it answers nonsense."""
    for key in ("rope__global__freq_base", "rope__freq_base"):
        c = config_from_metadata(as_arch("gemma3", **{key: 1e6}, rope__local__freq_base=5e3))
        assert c.rope.base == 1e6 and c.rope_local is not None and c.rope_local.base == 5e3
    both = {"rope__freq_base": 1e6, "rope__global__freq_base": 3.0, "rope__local__freq_base": 3.0}
    named = config_from_metadata(as_arch("gemma3", **both, rope__freq_base_swa=2e4))
    assert named.rope.base == 1e6 and named.rope_local is not None and named.rope_local.base == 2e4


def test_hunyuan_s_base_is_in_the_file_or_stretched_by_alpha() -> None:
    assert config_from_metadata(as_arch("hunyuan-dense", rope__freq_base=1e7)).rope.base == 1e7
    stretched = config_from_metadata(as_arch("hunyuan_vl", rope__scaling__alpha=1000.0)).rope.base
    assert stretched == pytest.approx(10000 * 1000 ** (16 / 14))
    with pytest.raises(UnsupportedModel, match=r"llama\.rope\.scaling\.alpha = 2"):
        config_from_metadata({**LLAMA, "llama.rope.scaling.alpha": 2.0})


@pytest.mark.parametrize("numbers", [None, 0.5, [0.5], [0.5, float("nan")], ["a", "b"]])
def test_numbers_of_each_layer_are_checked(numbers: object) -> None:
    keys = {f"xielu.{name}": [0.5, 0.25] for name in ("alpha_n", "alpha_p", "beta")}
    found = config_from_metadata(as_arch("apertus") | keys).per_layer
    assert found["beta"] == (0.5, 0.25)
    assert found["below"][1] - 0.25 == pytest.approx(np.log1p(np.exp(0.25)))
    with pytest.raises(UnsupportedModel, match=r"xielu\.alpha_p"):
        config_from_metadata(as_arch("apertus") | keys | {"xielu.alpha_p": numbers})


def test_layers_that_do_not_rotate_and_pairing_of_the_vision_model() -> None:
    assert config_from_metadata(as_arch("granite")).rope_layers == ()
    assert config_from_metadata(as_arch("granite", rope__scaling__finetuned=False)).rope_layers == (False, False)
    assert config_from_metadata(as_arch("glm4")).rope.adjacent
    assert not config_from_metadata(as_arch("glm4", rope__dimension_sections=[4, 2, 2, 0])).rope.adjacent


def test_one_tensor_per_expert_is_refused_with_the_reason(tmp_path: Path) -> None:
    gguf = open_gguf(tiny_gguf(tmp_path / "t.gguf", "qwen3moe"))
    tensors = {k.replace("_exps.", ".0."): v for k, v in gguf.tensors.items()}
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_gate_exps\.weight is missing.*one tensor per expert"):
        load_model(SimpleNamespace(metadata=gguf.metadata, tensors=tensors), create("reference"))  # type: ignore[arg-type]


def load_changed(path: Path, change: Any) -> None:
    gguf = open_gguf(tiny_gguf(path, "llama"))
    tensors = dict(gguf.tensors)
    change(tensors)
    load_model(SimpleNamespace(metadata=gguf.metadata, tensors=tensors), create("reference"))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_frequencies_are_not_divided_by_anything(value: float, tmp_path: Path) -> None:
    gguf = open_gguf(tiny_gguf(tmp_path / "t.gguf", "llama", optional=("rope_freqs.weight",)))
    assert "rope_freqs.weight" in gguf.tensors
    factors = np.full(8, value, np.float32)
    table = QTensor("rope_freqs.weight", GGMLType.F32, (8,), factors.view(np.uint8))
    opened: Any = SimpleNamespace(metadata=gguf.metadata, tensors={**gguf.tensors, "rope_freqs.weight": table})
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight must hold numbers above 0"):
        load_model(opened, create("reference"))


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
