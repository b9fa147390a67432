"""OLMo 2 and 3: no norm before a block's halves, one after each; RMS norms over the whole of q and k; halves rotate.

OLMo 3 files come under the same name: with a sliding window, every fourth layer is full, and only full layers scale
their rotation.
"""

from __future__ import annotations

from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, RMSNorm
from edgellm.models.metadata import Metadata, base_config, layer_windows, local_rope
from edgellm.models.tensors import Tensors

__all__ = ["Olmo2"]


class Block:
    """attend, norm, add; MLP, norm, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn = Attention(t, c, layer, rope, qk_norm=RMSNorm, qk_norm_over="row")
        self.post_attention_norm = RMSNorm(t, "post_attention_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "silu")
        self.post_ffw_norm = RMSNorm(t, "post_ffw_norm", c.norm_eps, c.dim)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.post_attention_norm(self.attn(x, batch, kv)))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.post_ffw_norm(self.ffn(x)))


class Olmo2(Decoder):
    """Arch `olmo2`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False)
        return replace(
            c,
            windows=layer_windows(meta, c.n_layers, period=4),
            rope_local=local_rope(meta, c.rope, c.rope.base, scaled=False),
        )
