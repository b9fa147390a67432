"""The tiny models whose goldens lie in tests/data/goldens: transformers config, GGUF keys, conversion rules.

The rules are those of the published converter (which tensor goes where, which rows are re-ordered, what is baked in);
`gguf.get_tensor_name_map` gives the names. Every file is also run in llama.cpp (`check_llamacpp.py`), so that a rule
that is wrong here and in our reader cannot cancel out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["CASES", "CONTEXT", "VOCAB", "Case"]

VOCAB, CONTEXT, WINDOW = 272, 256, 8
Tensor = np.ndarray
Rule = Callable[[str, Tensor], dict[str, Tensor]]
"""One transformers tensor -> tensors under transformers-like names, for what is no plain renaming."""

LAYERED = {"sliding_window": WINDOW}
COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@dataclass
class Case:
    """`keys`: GGUF keys without the architecture's prefix, beyond the common ones."""

    name: str
    arch: str
    model: str
    config: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    permuted: bool = False
    """q and k rows go from (i, i + d/2) pairs to adjacent ones."""
    norm_plus_one: bool = False
    rule: Rule | None = None
    llamacpp: str = "equal"
    """Or why llama.cpp does something else with this file."""


def experts(name: str, data: Tensor) -> dict[str, Tensor]:
    """transformers 5 keeps gate and up of all experts in one tensor."""
    if name.endswith("experts.gate_up_proj"):
        half = data.shape[1] // 2
        stem = name.removesuffix("gate_up_proj")
        return {f"{stem}gate_proj.weight": data[:, :half], f"{stem}up_proj.weight": data[:, half:]}
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": data}
    return {name: data}


def granite_experts(name: str, data: Tensor) -> dict[str, Tensor]:
    """As `experts`, under the names that the map knows."""
    return experts(name.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp"), data)


def shared_expert(name: str, data: Tensor) -> dict[str, Tensor]:
    """As `granite_experts`; gate and up of the shared expert are one matrix."""
    if name.endswith("shared_mlp.input_linear.weight"):
        half, stem = data.shape[0] // 2, name.replace("shared_mlp.input_linear.weight", "mlp.shared_expert.")
        return {f"{stem}gate_proj.weight": data[:half], f"{stem}up_proj.weight": data[half:]}
    return granite_experts(name.replace("shared_mlp.output_linear", "mlp.shared_expert.down_proj"), data)


def gpt_oss_experts(name: str, data: Tensor) -> dict[str, Tensor]:
    """gpt-oss: matrices are (in, out), gate and up alternate along `out`."""
    if "experts." not in name:
        return {name: data}
    kind = "bias" if name.endswith("_bias") else "weight"
    stem = name.removesuffix("_bias")
    data = data if kind == "bias" else data.transpose(0, 2, 1)
    if stem.endswith("gate_up_proj"):
        stem = stem.removesuffix("gate_up_proj")
        return {f"{stem}gate_proj.{kind}": data[:, ::2], f"{stem}up_proj.{kind}": data[:, 1::2]}
    return {f"{stem}.{kind}": data}


def moe_keys(used: int, width: int, **more: int) -> dict[str, Any]:
    return {"expert_count": 4, "expert_used_count": used, "expert_feed_forward_length": width, **more}


ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1 + 0.02 * i for i in range(6)],
    "long_factor": [1 + 0.35 * i for i in range(6)],
    "original_max_position_embeddings": 36,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
GRANITE_KEYS = {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.2, "logit_scale": 2.0}

CASES = [
    Case("llama", "llama", "Llama", {"rope_parameters": ROPE_LLAMA3}, permuted=True),
    Case(
        "llama-variant",
        "llama",
        "Llama",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0},
        },
        {
            **YARN_KEYS,
            "rope.scaling.yarn_attn_factor": 1.3,
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
        },
        permuted=True,
        llamacpp="does not read the keys of YaRN's factor and betas in this architecture",
    ),
    Case(
        "mistral3",
        "mistral3",
        "Ministral3",
        {
            "head_dim": 24,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.1},
        },
        {**YARN_KEYS, "rope.scaling.yarn_log_multiplier": 0.5, "attention.temperature_scale": 0.1},
        permuted=True,
    ),
    Case(
        "mixtral",
        "llama",
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        moe_keys(2, 64),
        permuted=True,
        rule=experts,
    ),
    Case("qwen2", "qwen2", "Qwen2", {"tie_word_embeddings": True}),
    Case("qwen3", "qwen3", "Qwen3", {"head_dim": 32, "rope_parameters": YARN}, YARN_KEYS),
    Case(
        "qwen2moe",
        "qwen2moe",
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        moe_keys(2, 32, expert_shared_feed_forward_length=48),
        rule=experts,
    ),
    Case(
        "qwen3moe",
        "qwen3moe",
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "head_dim": 16,
        },
        moe_keys(2, 32),
        rule=experts,
    ),
    Case("gemma", "gemma", "Gemma", {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}, norm_plus_one=True),
    Case(
        "gemma2",
        "gemma2",
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 15.0,
        },
        {
            "attention.sliding_window": WINDOW,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 15.0,
        },
        norm_plus_one=True,
    ),
    Case(
        "gemma3",
        "gemma3",
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {
            "attention.sliding_window": WINDOW,
            "rope.freq_base": 1000000.0,
            "rope.freq_base_swa": 10000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        norm_plus_one=True,
    ),
    Case(
        "phi2",
        "phi2",
        "Phi",
        {"partial_rotary_factor": 0.5, "num_key_value_heads": 4, "intermediate_size": 256},
        {"rope.dimension_count": 8},
    ),
    Case(
        "phi3",
        "phi3",
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 36, "sliding_window": None},
        {
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 36,
            "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(CONTEXT / 36) / np.log(36))),
            "attention.sliding_window": 0,
        },
        llamacpp="chooses the factors by the size of its context, not of the request",
    ),
    Case("smollm3", "smollm3", "SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, permuted=True),
    Case("olmo2", "olmo2", "Olmo2"),
    Case(
        "olmo3",
        "olmo2",
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": dict(YARN),
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {"attention.sliding_window": WINDOW, **YARN_KEYS},
    ),
    Case(
        "olmoe",
        "olmoe",
        "Olmoe",
        {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
        moe_keys(2, 32),
        rule=experts,
    ),
    Case(
        "granite",
        "granite",
        "Granite",
        GRANITE,
        GRANITE_KEYS,
        permuted=True,
    ),
    Case(
        "granitemoe",
        "granitemoe",
        "GraniteMoe",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
        {**GRANITE_KEYS, **moe_keys(2, 64)},
        permuted=True,
        rule=granite_experts,
    ),
    Case(
        "granitemoe-shared",
        "granitemoe",
        "GraniteMoeShared",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
        {**GRANITE_KEYS, **moe_keys(2, 64, expert_shared_feed_forward_length=48)},
        permuted=True,
        rule=shared_expert,
    ),
    Case(
        "gpt-oss",
        "gpt-oss",
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
        {**moe_keys(2, 64), "attention.sliding_window": WINDOW, **YARN_KEYS},
        rule=gpt_oss_experts,
        llamacpp="rounds the ends of the YaRN ramp to whole pairs",
    ),
    Case("starcoder2", "starcoder2", "Starcoder2", {"use_bias": True, "sliding_window": None}),
    Case(
        "cohere2",
        "cohere2",
        "Cohere2",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "logit_scale": 0.25, "head_dim": 16},
        {"attention.sliding_window": WINDOW, "logit_scale": 0.25},
    ),
    Case("command-r", "command-r", "Cohere", {"logit_scale": 0.25}, {"logit_scale": 0.25}),
    Case(
        "command-r-plus",
        "command-r",
        "Cohere",
        {"logit_scale": 0.25, "use_qk_norm": True},
        {"logit_scale": 0.25},
        llamacpp="expects q and k norms in models of 64 layers only (with 64 it was equal)",
    ),
    Case(
        "glm4",
        "glm4",
        "Glm4",
        {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
        {"rope.dimension_count": 8},
    ),
    Case(
        "stablelm",
        "stablelm",
        "StableLm",
        {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
        {"rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    Case(
        "stablelm-12b",
        "stablelm",
        "StableLm",
        {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.25},
        {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    Case(
        "exaone4",
        "exaone4",
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": ROPE_LLAMA3},
    ),
    Case(
        "exaone4-32b",
        "exaone4",
        "Exaone4",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": 4},
        {
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": [True, True, True, False],
        },
        llamacpp="has windows in the model of 64 layers only (with 64 it was equal)",
    ),
    Case("ernie4_5", "ernie4_5", "Ernie4_5", {"head_dim": 32}),
    Case("qwen2vl", "qwen2vl", "Qwen2", {"tie_word_embeddings": True}, {"rope.dimension_sections": [2, 3, 3, 0]}),
    Case("qwen3vl", "qwen3vl", "Qwen3", {"head_dim": 32}, {"rope.dimension_sections": [6, 5, 5, 0]}),
    Case(
        "qwen3vlmoe",
        "qwen3vlmoe",
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "head_dim": 16,
        },
        {**moe_keys(2, 32), "rope.dimension_sections": [3, 3, 2, 0]},
        rule=experts,
    ),
]
