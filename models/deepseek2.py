"""DeepSeek 2 and 3, GLM 4.7 Flash, Kimi and others with multi-head latent attention (MLA); experts as the file says.

Of a token the cache holds what all heads share: its compressed keys and values (`kv_lora_rank` numbers, normed) and one
rotated key part (adjacent pairs). Keys are never expanded: a head's query is taken through its own matrix into the
compressed space (`attn_k_b`), and what attention gives there out of it (`attn_v_b`), so attention has one head of k and
v. Files of 2024 have both matrices in one (`attn_kv_b`), which is taken apart when the model is loaded.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from edgellm.backends.base import Array, AttentionSpec, Batch, GGMLType, KVPages, QTensor, RopeSpec, Weight
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import Linear, RMSNorm, split
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.mixture import MIXTURE_KEYS, feed_forward, mixture_config
from edgellm.models.tensors import Tensors

__all__ = ["MLA_KEYS", "DeepSeek2", "LatentAttention", "latent_config"]

MLA_KEYS = ("attention.key_length_mla", "attention.kv_lora_rank")
GLM_FLASH = 47, 154880
"""Layers and vocabulary of GLM 4.7 Flash, whose first files do not say that its router is a sigmoid."""


class LatentAttention:
    """Attention in the compressed space. A query head is `plain` numbers and `rotated` ones."""

    def __init__(self, t: Tensors, c: ModelConfig, rope: RopeSpec):
        self.b, self.rope = t.backend, rope
        self.n_heads, self.rank, self.rotated = c.n_heads, c.v_dim, rope.n_dims
        self.plain, self.value = int(c.extra["key_dim"]) - rope.n_dims, int(c.extra["value_dim"])
        n_q, q_rank = c.n_heads * (self.plain + self.rotated), int(c.extra["q_rank"])
        self.attn_q = Linear(t, "attn_q_b", n_q, q_rank) if q_rank else Linear(t, "attn_q", n_q, c.dim)
        self.attn_q_a = Linear(t, "attn_q_a", q_rank, c.dim) if q_rank else None
        self.attn_q_a_norm = RMSNorm(t, "attn_q_a_norm", c.norm_eps, q_rank) if q_rank else None
        self.kv_a, self.k_rotated = split(t, "attn_kv_a_mqa", (self.rank, self.rotated), c.dim)
        self.attn_kv_a_norm = RMSNorm(t, "attn_kv_a_norm", c.norm_eps, self.rank)
        self.attn_k_b, self.attn_v_b = self._matrices(t)
        self.attn_output = Linear(t, "attn_output", c.dim, c.n_heads * self.value)
        self.spec = AttentionSpec(scale=c.attn_scale)

    def _matrices(self, t: Tensors) -> tuple[Weight, Weight]:
        """(heads, rank, plain) and (heads, value, rank)."""
        heads, rank = self.n_heads, self.rank
        if "attn_kv_b.weight" not in t:
            k_b = t.weight("attn_k_b.weight", heads, rank, self.plain)
            return k_b, t.weight("attn_v_b.weight", heads, self.value, rank)
        both = t.array("attn_kv_b.weight", heads * (self.plain + self.value), rank).reshape(heads, -1, rank)
        parts = {"k": both[:, : self.plain].swapaxes(1, 2), "v": both[:, self.plain :]}
        halves = {name: np.ascontiguousarray(part, np.float16) for name, part in parts.items()}
        k_b, v_b = (
            t.backend.load(QTensor(f"{t.prefix}attn_{name}_b.weight", GGMLType.F16, half.shape, half.view(np.uint8)))
            for name, half in halves.items()
        )
        return k_b, v_b

    def __call__(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        n, b = x.shape[0], self.b
        h = self.attn_q_a_norm(self.attn_q_a(x)) if self.attn_q_a and self.attn_q_a_norm else x
        q = self.attn_q(h).reshape(n, self.n_heads, self.plain + self.rotated)
        latent = self.attn_kv_a_norm(self.kv_a(x)).reshape(n, 1, self.rank)
        k_rotated = b.rope(self.k_rotated(x).reshape(n, 1, self.rotated), batch, self.rope)
        b.store_kv(kv, b.concat(latent, k_rotated), latent, batch)
        q_rotated = b.rope(b.columns(q, self.plain, self.plain + self.rotated), batch, self.rope)
        q_latent = b.head_linear(b.columns(q, 0, self.plain), self.attn_k_b)
        out = b.attention(b.concat(q_latent, q_rotated), kv, batch, self.spec)
        return self.attn_output(b.head_linear(out, self.attn_v_b).reshape(n, self.n_heads * self.value))


class Block:
    """norm, attend, add; norm, MLP or experts, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        assert rope is not None
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = LatentAttention(t, c, rope)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = feed_forward(t, c, layer)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)))


class DeepSeek2(Decoder):
    """Arch `deepseek2`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=True, computes=(*MIXTURE_KEYS, *MLA_KEYS))
        scoring = "sigmoid" if (c.n_layers, c.vocab_size) == GLM_FLASH else "softmax"
        # YaRN's magnitudes of q and k cancel out but for mscale_all_dim's, which is on the scores; without that one the
        # usual magnitude stays on q and k.
        stretch = math.log(c.rope.factor) if c.rope.scaling == "yarn" and c.rope.factor > 1 else 0.0
        multiplier = meta.number("rope.scaling.yarn_log_multiplier", 0.0, low=0)
        rope = replace(c.rope, yarn_magnitude=1.0) if multiplier else c.rope
        made = latent_config(meta, mixture_config(meta, c, scoring), c.v_dim)
        return replace(made, attn_scale=(1 + stretch * multiplier) ** 2 * made.attn_scale, rope=rope)


def latent_config(meta: Metadata, c: ModelConfig, value_dim: int) -> ModelConfig:
    """Cache and heads of latent attention. `value_dim`: width of a head's values where the file does not say."""
    rank = meta.integer("attention.kv_lora_rank", low=1)
    key = meta.integer("attention.key_length_mla", c.k_dim, low=1)
    n_rotated = meta.integer("rope.dimension_count", low=2, high=key - 1)
    sizes = {
        "key_dim": key,
        "value_dim": meta.integer("attention.value_length_mla", value_dim, low=1),
        "q_rank": meta.integer("attention.q_lora_rank", 0),
    }
    return replace(
        c, n_kv_heads=1, k_dim=rank + n_rotated, v_dim=rank, attn_scale=1 / math.sqrt(key), extra={**c.extra, **sizes}
    )
