"""ModernBERT: an encoder with pre-norm blocks (the first has no norm before attention), layer norms without bias, q, k
and v in one tensor and gate and up in one; every third layer, from the first on, sees the whole text, the others half a
window to either side; halves rotate, with a base of their own in windowed layers."""

from __future__ import annotations

from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.encoder import PreNormEncoder
from edgellm.models.layers import MLP, Attention, LayerNorm
from edgellm.models.metadata import Metadata, base_config, local_rope
from edgellm.models.tensors import Tensors

__all__ = ["ModernBert"]


class Block:
    """norm, attend, add; norm, MLP, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = LayerNorm(t, "attn_norm", c.norm_eps, c.dim) if layer else None
        self.attn = Attention(t, c, layer, rope)
        self.ffn_norm = LayerNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "gelu", fused=True)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x) if self.attn_norm else x, batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)))


class ModernBert(PreNormEncoder):
    """Arch `modern-bert`."""

    block, norm = Block, LayerNorm

    def __init__(self, config: ModelConfig, t: Tensors):
        super().__init__(config, t)
        self.token_embd_norm = LayerNorm(t, "token_embd_norm", config.norm_eps, config.dim)

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False, layer_norm=True, computes=("attention.causal",))
        window = meta.integer("attention.sliding_window", 0)
        period = meta.integer("attention.sliding_window_pattern", 3, low=1)
        windows = tuple(window // 2 + 1 if window and i % period else 0 for i in range(c.n_layers))
        local = local_rope(meta, c.rope, 10000.0, scaled=False)
        return replace(c, causal=False, windows=windows, rope_local=local, pooling=c.pooling or "mean")

    def embed(self, batch: Batch) -> Array:
        return self.token_embd_norm(super().embed(batch))
