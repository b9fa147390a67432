"""BERT: an encoder that only embeds. Learned positions, every token sees the whole text, a layer norm after each half.

The table of positions gets the vector of token type 0 added at load: texts here are never pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, QTensor
from edgellm.errors import UnsupportedModel
from edgellm.models.config import ModelConfig
from edgellm.models.layers import MLP, Attention, LayerNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors
from edgellm.quants import GGMLType

__all__ = ["Bert"]


class Block:
    """attend, add, norm; MLP, add, norm."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int):
        self.b = t.backend
        self.attn = Attention(t, c, layer, rope=None)
        self.attn_output_norm = LayerNorm(t, "attn_output_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "gelu", gated=False)
        self.layer_output_norm = LayerNorm(t, "layer_output_norm", c.norm_eps, c.dim)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.attn_output_norm(self.b.add(x, self.attn(x, batch, kv)))

    def feed(self, x: Array) -> Array:
        return self.layer_output_norm(self.b.add(x, self.ffn(x)))


class Bert:
    """Arch `bert`."""

    def __init__(self, config: ModelConfig, t: Tensors):
        c = config
        self.config, self.b = config, t.backend
        self.token_embd = t.weight("token_embd.weight", c.vocab_size, c.dim)
        self.position_embd = t.backend.load(_positions(t, c))
        self.token_embd_norm = LayerNorm(t, "token_embd_norm", c.norm_eps, c.dim)
        self.blk = [Block(t.scope(f"blk.{i}."), c, i) for i in range(c.n_layers)]

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        """The architecture's constants from a file's metadata."""
        c = base_config(meta, adjacent=False, layer_norm=True)
        return replace(c, causal=meta.flag("attention.causal", False), pooling=c.pooling or "mean")

    def hidden(self, batch: Batch, kv: Sequence[KVPages]) -> Array:
        """Hidden states of the rows `batch.output_rows`: (n_out, dim). Sequences must come whole, in one batch."""
        x = self.b.add(self.b.embed(self.token_embd, batch.ids), self.b.embed(self.position_embd, batch.positions))
        x = self.token_embd_norm(x)
        for block, pages in zip(self.blk, kv, strict=True):
            x = block.feed(block.attend(x, batch, pages))
        return self.b.take(x, batch.output_rows)

    def forward(self, batch: Batch, kv: Sequence[KVPages]) -> Array:
        """An encoder has no next token: raises UnsupportedModel."""
        raise UnsupportedModel(f"{self.config.arch} models embed texts and cannot generate; use embed")


def _positions(t: Tensors, c: ModelConfig) -> QTensor:
    """position_embd plus the row of token type 0, F32 (context_length, dim)."""
    table = t.array("position_embd.weight", c.context_length, c.dim)
    types = t.source.get("token_types.weight")
    if types is not None:
        table = table + t.array("token_types.weight", types.shape[0], c.dim)[0]
    data = table.view("uint8").reshape(c.context_length, c.dim * 4)
    return QTensor("position_embd.weight + token_types.weight[0]", GGMLType.F32, table.shape, data)
