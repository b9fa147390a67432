"""Falcon 1 and 2 (not 3, which is a llama): attention and MLP side by side behind one layer norm, or in the 40B model
behind one each; an MLP without a gate (GELU), no biases, often one head of k and v; halves rotate."""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, LayerNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["Falcon"]


class Block:
    """norm; attend and MLP side by side; add both."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = LayerNorm(t, "attn_norm", c.norm_eps, c.dim)
        two = "attn_norm_2.weight" in t
        self.attn_norm_2 = LayerNorm(t, "attn_norm_2", c.norm_eps, c.dim) if two else None
        self.attn = Attention(t, c, layer, rope)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "gelu", gated=False)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        h = self.attn_norm(x)
        attended = self.attn(self.attn_norm_2(x) if self.attn_norm_2 else h, batch, kv)
        return self.b.add(self.b.add(x, attended), self.ffn(h))

    def feed(self, x: Array) -> Array:
        return x


class Falcon(Decoder):
    """Arch `falcon`."""

    block, norm = Block, LayerNorm

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return base_config(meta, adjacent=False, layer_norm=True)
