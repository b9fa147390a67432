"""Arcee's mixture (Trinity): a norm before and after both halves of a block, a sigmoid gate on what attention gives,
RMS norms on each head of q and k; three of four layers are windowed, and only they rotate (halves); sigmoid-scored
experts and a shared one behind leading dense layers. The embedding is multiplied by sqrt(dim)."""

from __future__ import annotations

import math
from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import Attention, RMSNorm
from edgellm.models.metadata import Metadata, base_config, layer_windows, local_rope
from edgellm.models.mixture import MIXTURE_KEYS, feed_forward, mixture_config
from edgellm.models.tensors import Tensors

__all__ = ["AfMoE"]


class Block:
    """norm, attend, norm, add; norm, MLP or experts, norm, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope, qk_norm=RMSNorm, gated=True)
        self.post_attention_norm = RMSNorm(t, "post_attention_norm", c.norm_eps, c.dim)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = feed_forward(t, c, layer)
        self.post_ffw_norm = RMSNorm(t, "post_ffw_norm", c.norm_eps, c.dim)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.post_attention_norm(self.attn(self.attn_norm(x), batch, kv)))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.post_ffw_norm(self.ffn(self.ffn_norm(x))))


class AfMoE(Decoder):
    """Arch `afmoe`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = mixture_config(meta, base_config(meta, adjacent=False, computes=MIXTURE_KEYS), scoring="sigmoid")
        windows = layer_windows(meta, c.n_layers, period=4)
        return replace(
            c,
            windows=windows,
            rope_layers=tuple(w > 0 for w in windows),
            rope_local=local_rope(meta, c.rope, c.rope.base),
            embedding_scale=math.sqrt(c.dim),
            expert_normalise=meta.flag("expert_weights_norm", True),
        )
