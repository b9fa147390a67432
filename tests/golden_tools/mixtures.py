"""Cases of mixtures of experts."""

from __future__ import annotations

from tests.golden_tools.rules import (
    GRANITE,
    GRANITE_KEYS,
    WINDOW,
    YARN,
    YARN_KEYS,
    Case,
    experts,
    gpt_oss_experts,
    granite_experts,
    moe_keys,
    shared_expert,
)

__all__ = ["MIXTURES"]

MIXTURES = [
    Case(
        "mixtral",
        "llama",
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        moe_keys(2, 64),
        permuted=True,
        rule=experts,
    ),
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
    Case(
        "olmoe",
        "olmoe",
        "Olmoe",
        {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
        moe_keys(2, 32),
        rule=experts,
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
