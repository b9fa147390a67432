"""EXAONE 4: no norm before a block's halves, one after each; RMS norms on each head of q and k; halves rotate.

With a sliding window three of four layers are windowed, and only they rotate; without one all layers do.
"""

from __future__ import annotations

from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, RMSNorm
from edgellm.models.metadata import Metadata, base_config, layer_windows, local_rope
from edgellm.models.tensors import Tensors

__all__ = ["Exaone4"]


class Block:
    """attend, norm, add; MLP, norm, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn = Attention(t, c, layer, rope, qk_norm=RMSNorm)
        self.post_attention_norm = RMSNorm(t, "post_attention_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "silu")
        self.post_ffw_norm = RMSNorm(t, "post_ffw_norm", c.norm_eps, c.dim)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.post_attention_norm(self.attn(x, batch, kv)))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.post_ffw_norm(self.ffn(x)))


class Exaone4(Decoder):
    """Arch `exaone4`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False)
        windows = layer_windows(meta, c.n_layers, period=4, default=4096 if c.n_layers == 64 else 0)
        local = local_rope(meta, c.rope, c.rope.base)
        return replace(c, windows=windows, rope_layers=tuple(w > 0 for w in windows), rope_local=local)
