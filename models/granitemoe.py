"""Granite's mixture of experts: Granite's block, its weights a softmax over the chosen experts' scores; some models
add a shared expert."""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec, RouteSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.granite import granite_config
from edgellm.models.layers import MLP, Attention, MoE, RMSNorm
from edgellm.models.metadata import Metadata
from edgellm.models.tensors import Tensors

__all__ = ["GraniteMoE"]


class Block:
    """norm, attend, add scaled; norm, experts, add scaled."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b, self.residual_scale = t.backend, c.residual_scale
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MoE(t, c, RouteSpec(c.n_experts_used, "softmax_topk", normalise=False))
        self.ffn_shexp = MLP(t, c.dim, c.shared_ffn_dim, "silu", suffix="_shexp") if c.shared_ffn_dim else None

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv), self.residual_scale)

    def feed(self, x: Array) -> Array:
        h = self.ffn_norm(x)
        y = self.b.add(self.ffn(h), self.ffn_shexp(h)) if self.ffn_shexp else self.ffn(h)
        return self.b.add(x, y, self.residual_scale)


class GraniteMoE(Decoder):
    """Arch `granitemoe`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return granite_config(meta)
