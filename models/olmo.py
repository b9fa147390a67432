"""OLMo 1: Llama's block with layer norms that have no weights; q and k re-ordered like Llama's."""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, LayerNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["Olmo"]


class PlainNorm(LayerNorm):
    """(x - mean) / std over the last axis."""

    def __init__(self, t: Tensors, name: str, eps: float, *shape: int):
        self.b, self.eps, self.weight, self.bias = t.backend, eps, None, None


class Block:
    """norm, attend, add; norm, MLP, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = PlainNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope)
        self.ffn_norm = PlainNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "silu")

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)))


class Olmo(Decoder):
    """Arch `olmo`."""

    block, norm = Block, PlainNorm

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return base_config(meta, adjacent=True, layer_norm=True)
