"""Ling 2 and Ring 2: Qwen 3's attention with q, k and v in one tensor, part of each head rotates (halves); experts in
groups, sigmoid-scored, and a shared one behind leading dense layers."""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import Attention, RMSNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.mixture import MIXTURE_KEYS, feed_forward, mixture_config
from edgellm.models.tensors import Tensors

__all__ = ["BailingMoE2"]


class Block:
    """norm, attend, add; norm, MLP or experts, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope, qk_norm=RMSNorm)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = feed_forward(t, c, layer)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)))


class BailingMoE2(Decoder):
    """Arch `bailingmoe2`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False, computes=MIXTURE_KEYS)
        return mixture_config(meta, c, scoring="sigmoid")
