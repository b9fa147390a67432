"""MiniMax M2: RMS norms over the whole of q and k, part of each head rotates (halves); sigmoid-scored experts in every
layer, the chosen weights renormalised."""

from __future__ import annotations

from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import Attention, RMSNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.mixture import MIXTURE_KEYS, SharedMoE, mixture_config
from edgellm.models.tensors import Tensors

__all__ = ["MiniMaxM2"]


class Block:
    """norm, attend, add; norm, experts, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope, qk_norm=RMSNorm, qk_norm_over="row")
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = SharedMoE(t, c)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)))


class MiniMaxM2(Decoder):
    """Arch `minimax-m2`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False, computes=MIXTURE_KEYS)
        return replace(mixture_config(meta, c, scoring="sigmoid"), expert_normalise=True)
