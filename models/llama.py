"""Llama, and what shares its shape and name: Mistral, Mixtral (experts), SmolLM, TinyLlama and many more;
InternLM 2 under its own name.

Pre-norm blocks, grouped-query attention, gated SiLU MLP. The converter re-orders the rows of q and k, so adjacent
pairs rotate. Llama 3's frequency factors come as the tensor `rope_freqs.weight`.
"""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec, RouteSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, MoE, RMSNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["Llama"]


class Block:
    """norm, attend, add; norm, MLP or experts, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MoE(t, c, RouteSpec(c.n_experts_used)) if c.n_experts else MLP(t, c.dim, c.ffn_dim, "silu")

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)))


class Llama(Decoder):
    """Archs `llama` and `internlm2`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return base_config(meta, adjacent=True)
