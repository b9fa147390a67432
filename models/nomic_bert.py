"""Nomic's encoder: BERT's block with rotation (halves) in place of learned positions, q, k and v in one tensor, and a
gated SiLU MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.bert import Encoder
from edgellm.models.config import ModelConfig
from edgellm.models.layers import MLP, Attention, LayerNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["NomicBert", "nomic_config"]


class Block:
    """attend, add, norm; MLP, add, norm."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn = Attention(t, c, layer, rope)
        self.attn_output_norm = LayerNorm(t, "attn_output_norm", c.norm_eps, c.dim)
        self.ffn = self.feed_forward(t, c, layer)
        self.layer_output_norm = LayerNorm(t, "layer_output_norm", c.norm_eps, c.dim)

    def feed_forward(self, t: Tensors, c: ModelConfig, layer: int) -> Callable[[Array], Array]:
        """What a layer feeds its rows through."""
        return MLP(t, c.dim, c.ffn_dim, "silu")

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.attn_output_norm(self.b.add(x, self.attn(x, batch, kv)))

    def feed(self, x: Array) -> Array:
        return self.layer_output_norm(self.b.add(x, self.ffn(x)))


class NomicBert(Encoder):
    """Arch `nomic-bert`."""

    block = Block

    def __init__(self, config: ModelConfig, t: Tensors):
        super().__init__(config, t)
        self.token_types = t.optional("token_types.weight", int(config.extra["token_types"]), config.dim)

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        """The architecture's constants from a file's metadata."""
        return nomic_config(meta, base_config(meta, adjacent=False, layer_norm=True, computes=("attention.causal",)))

    def embed(self, batch: Batch) -> Array:
        x = self.b.embed(self.token_embd, batch.ids)
        if self.token_types is None:
            return x
        # Texts are never pairs, so each row wants the vector of type 0; rope_variants are the zeros at hand.
        return self.b.add(x, self.b.embed(self.token_types, batch.rope_variants))


def nomic_config(meta: Metadata, c: ModelConfig) -> ModelConfig:
    """What is no decoder's: direction, pooling, types of tokens."""
    n_types = meta.values.get("tokenizer.ggml.token_type_count", 2)
    extra = {**c.extra, "token_types": float(n_types if isinstance(n_types, int) else 2)}
    return replace(c, causal=meta.flag("attention.causal", False), pooling=c.pooling or "mean", extra=extra)
