"""MiniCPM 3: DeepSeek's latent attention (but halves rotate) in MiniCPM's block, with the 4B model's factors on the
embedding, on what each half adds and on the logits; LongRoPE's two tables where the file has them, whatever it calls
its scaling."""

from __future__ import annotations

import math
from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.deepseek2 import MLA_KEYS, LatentAttention, latent_config
from edgellm.models.layers import MLP, RMSNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["MiniCPM3"]


class Block:
    """norm, attend, add scaled; norm, MLP, add scaled."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        assert rope is not None
        self.b, self.residual_scale = t.backend, c.residual_scale
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = LatentAttention(t, c, rope)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "silu")

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv), self.residual_scale)

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)), self.residual_scale)


class MiniCPM3(Decoder):
    """Arch `minicpm3`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False, computes=MLA_KEYS)
        return replace(
            latent_config(meta, c, c.dim // c.n_heads),
            embedding_scale=12.0,
            residual_scale=1.4 / math.sqrt(c.n_layers),
            logit_scale=256 / c.dim,
            rope=replace(c.rope, scaling="longrope"),
        )
