"""Granite: Llama's block with four factors: on the embedding, on the scores, on what each half adds, on the logits.

The last is stored as a divisor. q and k are re-ordered like Llama's, so adjacent pairs rotate.
"""

from __future__ import annotations

from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, RMSNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["Granite", "granite_config"]


class Block:
    """norm, attend, add scaled; norm, MLP, add scaled."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b, self.residual_scale = t.backend, c.residual_scale
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "silu")

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv), self.residual_scale)

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)), self.residual_scale)


class Granite(Decoder):
    """Arch `granite`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return granite_config(meta)


def granite_config(meta: Metadata) -> ModelConfig:
    """Shapes and the four factors."""
    c = base_config(
        meta,
        adjacent=True,
        embedding_scale=meta.number("embedding_scale", 1.0),
        residual_scale=meta.number("residual_scale", 1.0),
        attn_scale=meta.number("attention.scale", 0.0, low=0),
        logit_scale=1 / (meta.number("logit_scale", 1.0, low=0) or 1.0),
        shared_ffn_dim=meta.integer("expert_shared_feed_forward_length", 0),
    )
    rotates = meta.flag("rope.scaling.finetuned", True)  # how a file says that no layer rotates
    return replace(c, rope_layers=() if rotates else (False,) * c.n_layers)
