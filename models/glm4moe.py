"""GLM 4.5 to 4.7 (and Air): biases on q, k and v, part of each head rotates (halves), in the biggest model RMS norms on
each head of q and k; sigmoid-scored experts behind leading dense layers. The norm before the experts is called
`post_attention_norm` in the file."""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import Attention, RMSNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.mixture import MIXTURE_KEYS, feed_forward, mixture_config
from edgellm.models.tensors import Tensors

__all__ = ["Glm4MoE"]


class Block:
    """norm, attend, add; norm, MLP or experts, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        qk_norm = RMSNorm if "attn_q_norm.weight" in t else None
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope, qk_norm)
        self.post_attention_norm = RMSNorm(t, "post_attention_norm", c.norm_eps, c.dim)
        self.ffn = feed_forward(t, c, layer)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.post_attention_norm(x)))


class Glm4MoE(Decoder):
    """Arch `glm4moe`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False, computes=MIXTURE_KEYS)
        return mixture_config(meta, c, scoring="sigmoid")
