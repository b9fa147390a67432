"""Phi 1.5 and 2: attention and MLP read the same normed input and are added together; layer norms, biases everywhere
(on the logits too), an MLP without a gate (tanh GELU); part of each head rotates (halves)."""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, LayerNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["Phi2"]


class Block:
    """norm; attend and MLP side by side; add both."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = LayerNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "gelu_tanh", gated=False)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        h = self.attn_norm(x)
        return self.b.add(self.b.add(x, self.attn(h, batch, kv)), self.ffn(h))

    def feed(self, x: Array) -> Array:
        return x


class Phi2(Decoder):
    """Arch `phi2`."""

    block, norm = Block, LayerNorm

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return base_config(meta, adjacent=False, layer_norm=True)
