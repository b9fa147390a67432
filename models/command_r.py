"""Command R: attention and MLP read the same normed input and are added together; layer norms without bias; the
logits are scaled; adjacent pairs rotate. Command R+ also norms each head of q and k (a weight row per head)."""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, LayerNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["Block", "CommandR"]


class Block:
    """norm; attend and MLP side by side; add both."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        qk_norm = LayerNorm if "attn_q_norm.weight" in t else None
        self.attn_norm = LayerNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope, qk_norm, qk_norm_over="heads")
        self.ffn = MLP(t, c.dim, c.ffn_dim, "silu")

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        h = self.attn_norm(x)
        return self.b.add(self.b.add(x, self.attn(h, batch, kv)), self.ffn(h))

    def feed(self, x: Array) -> Array:
        return x


class CommandR(Decoder):
    """Arch `command-r`."""

    block, norm = Block, LayerNorm

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return base_config(meta, adjacent=True, layer_norm=True, logit_scale=meta.number("logit_scale", 1.0))
