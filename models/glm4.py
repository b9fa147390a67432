"""GLM 4 (0414): a norm before and after both halves of a block, gate and up in one tensor, part of each head rotates
(adjacent pairs; halves in the text part of the vision model, whose file has `rope.dimension_sections`)."""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, RMSNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["Glm4"]


class Block:
    """norm, attend, norm, add; norm, MLP, norm, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope)
        self.post_attention_norm = RMSNorm(t, "post_attention_norm", c.norm_eps, c.dim)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "silu", fused=True)
        self.post_ffw_norm = RMSNorm(t, "post_ffw_norm", c.norm_eps, c.dim)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        h = self.attn(self.attn_norm(x), batch, kv)
        return self.b.add(x, self.post_attention_norm(h))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.post_ffw_norm(self.ffn(self.ffn_norm(x))))


class Glm4(Decoder):
    """Arch `glm4`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return base_config(meta, adjacent=not meta.has("rope.dimension_sections"))
