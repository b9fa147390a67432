"""Hunyuan, dense and mixture of experts: Llama's block with an RMS norm on each head of q and k, behind the rotation;
halves rotate.

In the mixture softmax over all experts, the chosen weights renormalised, and a shared expert.

The base of the rotation is stretched for long texts (NTK-aware scaling): files hold the stretched base, or, of the
vision model, the base and `rope.scaling.alpha`. The text part of that is the same: the positions of a text's token are
equal.
"""

from __future__ import annotations

from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, RMSNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.mixture import SharedMoE
from edgellm.models.tensors import Tensors

__all__ = ["Hunyuan"]


class Block:
    """norm, attend, add; norm, MLP or experts, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope, qk_norm=RMSNorm, rope_first=True)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = SharedMoE(t, c) if c.n_experts else MLP(t, c.dim, c.ffn_dim, "silu")

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)))


class Hunyuan(Decoder):
    """Archs `hunyuan-dense`, `hunyuan-moe` and, for text, `hunyuan_vl`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False, computes=("rope.scaling.alpha",))
        alpha = meta.number("rope.scaling.alpha", 0.0, low=0, high=1e6) or 1.0
        rope = replace(c.rope, base=c.rope.base * alpha ** (c.k_dim / max(c.k_dim - 2, 1)))
        return replace(c, rope=rope, shared_ffn_dim=meta.integer("expert_shared_feed_forward_length", c.ffn_dim))
