"""The tiny models whose goldens lie in tests/data/goldens: transformers config, GGUF keys, conversion rules.

The rules are those of the published converter (which tensor goes where, which rows are re-ordered, what is baked in);
`gguf.get_tensor_name_map` gives the names. Every file is also run in llama.cpp (`check_llamacpp.py`), so that a rule
that is wrong here and in our reader cannot cancel out.
"""

from __future__ import annotations

import numpy as np

from tests.golden_tools.mixtures import MIXTURES
from tests.golden_tools.rules import (
    CONTEXT,
    GRANITE,
    GRANITE_KEYS,
    LONGROPE,
    ROPE_LLAMA3,
    WINDOW,
    YARN,
    YARN_KEYS,
    Case,
    grouped_qkv,
    transposed,
    without_activation,
)

__all__ = ["CASES"]

DENSE = [
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
    Case("qwen2", "qwen2", "Qwen2", {"tie_word_embeddings": True}),
    Case("qwen3", "qwen3", "Qwen3", {"head_dim": 32, "rope_parameters": YARN}, YARN_KEYS),
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
        "granite",
        "granite",
        "Granite",
        GRANITE,
        GRANITE_KEYS,
        permuted=True,
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
    Case("seed_oss", "seed_oss", "SeedOss", {"head_dim": 32, "attention_bias": True}),
    Case(
        "hunyuan-dense",
        "hunyuan-dense",
        "HunYuanDenseV1",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
        },
        {"rope.freq_base": 10000.0 * 50 ** (32 / 30)},
    ),
    Case(
        "nemotron",
        "nemotron",
        "Nemotron",
        {"partial_rotary_factor": 0.5, "head_dim": 16},
        {"rope.dimension_count": 8},
        norm_plus_one=True,
    ),
    Case("apertus", "apertus", "Apertus", {"rope_parameters": ROPE_LLAMA3}, rule=without_activation),
    Case(
        "minicpm3",
        "minicpm3",
        "MiniCPM3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.2, 1.5, 2.0],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "original_max_position_embeddings": CONTEXT,
            },
        },
        {
            "attention.q_lora_rank": 32,
            "attention.kv_lora_rank": 32,
            "attention.key_length": 24,
            "attention.value_length": None,
            "rope.dimension_count": 8,
        },
    ),
    # Qwen 1 has no class in transformers; Qwen 2's is the same with q, k and v in one tensor.
    Case("qwen", "qwen", "Qwen2", {"num_key_value_heads": 4}, {"feed_forward_length": 128}, fused=True),
    Case("arcee", "arcee", "Arcee", {"rope_parameters": YARN, "head_dim": 16}, YARN_KEYS, permuted=True),
    # MiniCPM has no class in transformers; Granite's is the same with the plain attention scale.
    Case(
        "minicpm",
        "minicpm",
        "Granite",
        {**GRANITE, "attention_multiplier": 0.25},
        {"embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 2.0},
        permuted=True,
    ),
    Case("qwen2vl", "qwen2vl", "Qwen2", {"tie_word_embeddings": True}, {"rope.dimension_sections": [2, 3, 3, 0]}),
    Case("qwen3vl", "qwen3vl", "Qwen3", {"head_dim": 32}, {"rope.dimension_sections": [6, 5, 5, 0]}),
]

LEARNED = {"n_positions": CONTEXT, "n_inner": 128, "intermediate_size": 128}
CLASSICS = [
    # EXAONE 3 and InternLM 2 have no class in transformers; Llama's is the same.
    Case("exaone", "exaone", "Llama", {"rope_parameters": ROPE_LLAMA3}),
    Case("internlm2", "internlm2", "Llama", permuted=True),
    Case(
        "chatglm",
        "chatglm",
        "Glm",
        {"head_dim": 16, "partial_rotary_factor": 0.5},
        {"rope.dimension_count": 8},
    ),
    Case(
        "gptneox",
        "gptneox",
        "GPTNeoX",
        {"rotary_pct": 0.25, "num_key_value_heads": 4},
        {"rope.dimension_count": 4, "use_parallel_residual": True},
        rule=grouped_qkv(4),
        llamacpp="has the tanh GELU",
    ),
    Case(
        "gptneox-serial",
        "gptneox",
        "GPTNeoX",
        {"rotary_pct": 1.0, "num_key_value_heads": 4, "use_parallel_residual": False},
        {"rope.dimension_count": 16, "use_parallel_residual": False},
        rule=grouped_qkv(4),
        llamacpp="has the tanh GELU",
    ),
    Case(
        "falcon",
        "falcon",
        "Falcon",
        {"intermediate_size": 128, "ffn_hidden_size": 128},
        {"attention.head_count_kv": 1},
        rule=grouped_qkv(1),
        llamacpp="has the tanh GELU",
    ),
    Case(
        "falcon-40b",
        "falcon",
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "intermediate_size": 128, "ffn_hidden_size": 128},
        rule=grouped_qkv(2),
        llamacpp="has the tanh GELU",
    ),
    Case("olmo", "olmo", "Olmo", permuted=True),
    Case("gpt2", "gpt2", "GPT2", LEARNED, {"attention.head_count_kv": 4}, rule=transposed),
    Case("starcoder", "starcoder", "GPTBigCode", LEARNED, {"attention.head_count_kv": 1}),
]

CASES = [*CLASSICS, *DENSE, *MIXTURES]
