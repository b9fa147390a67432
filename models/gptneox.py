"""GPT-NeoX and Pythia: layer norms and biases everywhere, an MLP without a gate (GELU); attention and MLP side by side,
each behind its own norm, unless the file says one after the other; part of each head rotates (halves)."""

from __future__ import annotations

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, LayerNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["GPTNeoX"]


class Block:
    """attend and MLP side by side, each behind its norm; add both. Or: norm, attend, add; norm, MLP, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b, self.parallel = t.backend, bool(c.extra["parallel_residual"])
        self.attn_norm = LayerNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope)
        self.ffn_norm = LayerNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "gelu", gated=False)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        y = self.b.add(x, self.attn(self.attn_norm(x), batch, kv))
        return self.b.add(y, self.ffn(self.ffn_norm(x))) if self.parallel else y

    def feed(self, x: Array) -> Array:
        return x if self.parallel else self.b.add(x, self.ffn(self.ffn_norm(x)))


class GPTNeoX(Decoder):
    """Arch `gptneox`."""

    block, norm = Block, LayerNorm

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        parallel = meta.flag("use_parallel_residual", True)
        return base_config(meta, adjacent=False, layer_norm=True, extra={"parallel_residual": float(parallel)})
