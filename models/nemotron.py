"""Nemotron and Minitron: layer norms (the file's weights have the added 1), an MLP without a gate whose activation is a
squared ReLU; part of each head rotates (halves)."""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, LayerNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["Nemotron"]


class Block:
    """norm, attend, add; norm, MLP, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = LayerNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope)
        self.ffn_norm = LayerNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "relu2", gated=False)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)))


class Nemotron(Decoder):
    """Arch `nemotron`."""

    block, norm = Block, LayerNorm

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return base_config(meta, adjacent=False, layer_norm=True)
