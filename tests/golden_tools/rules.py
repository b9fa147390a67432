"""What a golden case is, and the conversion rules that more than one needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = [
    "COMMON",
    "CONTEXT",
    "GRANITE",
    "GRANITE_KEYS",
    "LONGROPE",
    "ROPE_LLAMA3",
    "VOCAB",
    "WINDOW",
    "YARN",
    "YARN_KEYS",
    "Case",
    "biased_experts",
    "experts",
    "gpt_oss_experts",
    "granite_experts",
    "grouped_qkv",
    "latent",
    "moe_keys",
    "shared_expert",
    "transposed",
    "unbiased_experts",
    "without_activation",
]

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
    """`keys`: GGUF keys without the architecture's prefix, beyond the common ones; None takes one away."""

    name: str
    arch: str
    model: str
    config: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    permuted: bool = False
    """q and k rows go from (i, i + d/2) pairs to adjacent ones."""
    norm_plus_one: bool = False
    fused: bool = False
    """q, k and v go into one tensor."""
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


def biased_experts(name: str, data: Tensor) -> dict[str, Tensor]:
    """As `experts`; a bias of the router that moves the choice."""
    name = name.replace("gate.moe_statics", "moe_statics").replace("e_score_correction_bias", "e_score_correction.bias")
    name = name.replace("mlp.e_score", "mlp.gate.e_score").replace(".expert_bias", ".expert_bias.bias")
    return experts(name, data.reshape(-1) if name.endswith("correction.bias") else data)


def grouped_qkv(n_groups: int) -> Rule:
    """q, k and v lie in groups (some heads of q, one of k, one of v): to all of q, all of k, all of v. Heads of 16."""

    def rule(name: str, data: Tensor) -> dict[str, Tensor]:
        if "query_key_value" in name:
            heads = data.reshape(n_groups, -1, 16, *data.shape[1:])
            parts = (heads[:, :-2], heads[:, -2], heads[:, -1])
            data = np.concatenate([part.reshape(-1, *data.shape[1:]) for part in parts])
        return {name: data}

    return rule


def latent(n_heads: int, plain: int) -> Rule:
    """As `biased_experts`; the matrix that expands keys and values, taken apart, the keys' transposed."""

    def rule(name: str, data: Tensor) -> dict[str, Tensor]:
        if name.endswith("kv_b_proj.weight"):
            both, stem = data.reshape(n_heads, -1, data.shape[-1]), name.removesuffix("kv_b_proj.weight")
            k, v = both[:, :plain].swapaxes(1, 2), both[:, plain:]
            return {f"{stem}k_b_proj.weight": k, f"{stem}v_b_proj.weight": v}
        return biased_experts(name, data)

    return rule


def without_activation(name: str, data: Tensor) -> dict[str, Tensor]:
    """The numbers of an activation are metadata."""
    return {} if ".act_fn." in name else {name: data}


def transposed(name: str, data: Tensor) -> dict[str, Tensor]:
    """GPT-2 keeps the matrices of its blocks as (in, out)."""
    return {name: data.T if ".h." in name and data.ndim == 2 else data}


def unbiased_experts(name: str, data: Tensor) -> dict[str, Tensor]:
    """As `experts`, of a model whose router has no bias."""
    return {} if "e_score_correction" in name else experts(name, data)


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
