"""StableLM 2: layer norms, part of each head rotates (halves), optional biases on q, k and v.

The 12B model has no second norm: there the MLP reads what the attention reads, and both are added at once; it also
norms each head of q and k (a weight row per head).
"""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, LayerNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["StableLM"]


class Block:
    """norm, attend, add; norm, MLP, add. Or, without a second norm: norm; attend and MLP side by side; add both."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        qk_norm = LayerNorm if "attn_q_norm.weight" in t else None
        self.attn_norm = LayerNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope, qk_norm, qk_norm_over="heads")
        self.ffn_norm = LayerNorm(t, "ffn_norm", c.norm_eps, c.dim) if "ffn_norm.weight" in t else None
        self.ffn = MLP(t, c.dim, c.ffn_dim, "silu")

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        h = self.attn_norm(x)
        x = self.b.add(x, self.attn(h, batch, kv))
        return x if self.ffn_norm else self.b.add(x, self.ffn(h))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x))) if self.ffn_norm else x


class StableLM(Decoder):
    """Arch `stablelm`."""

    block, norm = Block, LayerNorm

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return base_config(meta, adjacent=False, layer_norm=True)
