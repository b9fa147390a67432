"""Qwen 1.5/2 MoE: Qwen 2's attention; routed experts whose weights are not renormalised, plus a shared expert behind
a sigmoid gate."""

from __future__ import annotations

from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec, RouteSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, GatedExpert, MoE, RMSNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["Qwen2MoE"]


class Block:
    """norm, attend, add; norm, chosen experts and shared expert, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MoE(t, c, RouteSpec(c.n_experts_used, normalise=False))
        shared = MLP(t, c.dim, c.shared_ffn_dim, "silu", suffix="_shexp")
        self.ffn_shexp = GatedExpert(t, "ffn_gate_inp_shexp", c.dim, shared)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        h = self.ffn_norm(x)
        return self.b.add(x, self.b.add(self.ffn(h), self.ffn_shexp(h)))


class Qwen2MoE(Decoder):
    """Arch `qwen2moe`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        shared = meta.integer("expert_shared_feed_forward_length", meta.integer("feed_forward_length", 0), low=1)
        return expert_width(meta, base_config(meta, adjacent=False, shared_ffn_dim=shared))


def expert_width(meta: Metadata, c: ModelConfig) -> ModelConfig:
    """The first files do not say how wide an expert is: `feed_forward_length` was that of all chosen ones together."""
    width = meta.integer("expert_feed_forward_length", c.ffn_dim // max(c.n_experts_used, 1))
    return replace(c, expert_ffn_dim=width)
