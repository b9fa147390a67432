"""BERT: an encoder that only embeds. Every token sees the whole text, and a layer norm follows each half of a block.

Positions are learned; their table gets the vector of token type 0 added at load, as texts here are never pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from edgellm.backends.base import Array, Batch, KVPages, QTensor, RopeSpec
from edgellm.errors import UnsupportedModel
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Block as AnyBlock
from edgellm.models.layers import MLP, Attention, LayerNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.rope import layer_ropes
from edgellm.models.tensors import Tensors
from edgellm.quants import GGMLType

__all__ = ["Bert", "Encoder"]


class Block:
    """attend, add, norm; MLP, add, norm."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn = Attention(t, c, layer, rope)
        self.attn_output_norm = LayerNorm(t, "attn_output_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "gelu", gated=False)
        self.layer_output_norm = LayerNorm(t, "layer_output_norm", c.norm_eps, c.dim)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.attn_output_norm(self.b.add(x, self.attn(x, batch, kv)))

    def feed(self, x: Array) -> Array:
        return self.layer_output_norm(self.b.add(x, self.ffn(x)))


class Encoder(ABC):
    """What encoders share: embedding, norm, blocks. Subclasses set `block` and say what is added to the embedding."""

    block: ClassVar[type[AnyBlock]]

    def __init__(self, config: ModelConfig, t: Tensors):
        c = config
        self.config, self.b = config, t.backend
        self.token_embd = t.weight("token_embd.weight", c.vocab_size, c.dim)
        self.token_embd_norm = LayerNorm(t, "token_embd_norm", c.norm_eps, c.dim)
        ropes = layer_ropes(c, t)
        self.blk = [self.block(t.scope(f"blk.{i}."), c, i, ropes[i]) for i in range(c.n_layers)]

    @abstractmethod
    def embed(self, batch: Batch) -> Array:
        """Token embeddings with what else belongs to them: (n_tokens, dim)."""

    def hidden(self, batch: Batch, kv: Sequence[KVPages]) -> Array:
        """Hidden states of the rows `batch.output_rows`: (n_out, dim). Sequences must come whole, in one batch."""
        x = self.token_embd_norm(self.embed(batch))
        for block, pages in zip(self.blk, kv, strict=True):
            x = block.feed(block.attend(x, batch, pages))
        return self.b.take(x, batch.output_rows)

    def forward(self, batch: Batch, kv: Sequence[KVPages]) -> Array:
        """An encoder has no next token: raises UnsupportedModel."""
        raise UnsupportedModel(f"{self.config.arch} models embed texts and cannot generate; use embed")


class Bert(Encoder):
    """Arch `bert`."""

    block = Block

    def __init__(self, config: ModelConfig, t: Tensors):
        super().__init__(config, t)
        self.position_embd = t.backend.load(_positions(t, config))

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        """The architecture's constants from a file's metadata."""
        c = base_config(meta, adjacent=False, layer_norm=True, computes=("attention.causal",), position_table=True)
        causal = meta.flag("attention.causal", False)
        return replace(c, causal=causal, pooling=c.pooling or "mean", rope_layers=(False,) * c.n_layers)

    def embed(self, batch: Batch) -> Array:
        return self.b.add(self.b.embed(self.token_embd, batch.ids), self.b.embed(self.position_embd, batch.positions))


def _positions(t: Tensors, c: ModelConfig) -> QTensor:
    """position_embd plus the row of token type 0, F32 (context_length, dim)."""
    table = t.array("position_embd.weight", c.context_length, c.dim)
    types = t.source.get("token_types.weight")
    if types is not None:
        table = table + t.array("token_types.weight", types.shape[0], c.dim)[0]
    data = table.view("uint8").reshape(c.context_length, c.dim * 4)
    return QTensor("position_embd.weight + token_types.weight[0]", GGMLType.F32, table.shape, data)
