"""Qwen 3 MoE: Qwen 3's attention; softmax over all experts, the chosen weights renormalised, no shared expert."""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec, RouteSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import Attention, MoE, RMSNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.qwen2moe import expert_width
from edgellm.models.tensors import Tensors

__all__ = ["Qwen3MoE"]


class Block:
    """norm, attend, add; norm, experts, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope, qk_norm=RMSNorm)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MoE(t, c, RouteSpec(c.n_experts_used))

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)))


class Qwen3MoE(Decoder):
    """Archs `qwen3moe` and, for text, `qwen3vlmoe`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return expert_width(meta, base_config(meta, adjacent=False))
