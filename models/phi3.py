"""Phi 3 and Phi 4: q, k, v in one tensor, gate and up in another; part of each head rotates (halves); LongRoPE.

The long factors apply to requests that may outgrow the original context, for their whole length: the choice must not
change while keys lie in the cache. Models with a sliding window have it in every layer.
"""

from __future__ import annotations

from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, RMSNorm
from edgellm.models.metadata import Metadata, base_config, layer_windows
from edgellm.models.tensors import Tensors

__all__ = ["Phi3"]


class Block:
    """norm, attend, add; norm, MLP, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "silu", fused=True)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)))


class Phi3(Decoder):
    """Arch `phi3`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False)
        if c.rope.scaling == "none":  # no key says so, and without factors it is the plain table
            c = replace(c, rope=replace(c.rope, scaling="longrope"))
        return replace(c, windows=layer_windows(meta, c.n_layers, period=0))
