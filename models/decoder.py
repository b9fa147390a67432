"""The frame all decoder models share: embedding, blocks, final norm, output head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.layers import LayerNorm, RMSNorm
from edgellm.models.metadata import Metadata
from edgellm.models.rope import layer_ropes
from edgellm.models.tensors import Tensors

__all__ = ["Block", "Decoder"]


class Block(Protocol):
    """One layer in two halves, each (n, dim) -> (n, dim)."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None) -> None: ...

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        """The half in which tokens see each other; writes this layer's keys and values."""
        ...

    def feed(self, x: Array) -> Array:
        """The half that computes row by row."""
        ...


class Decoder(ABC):
    """A model of one architecture. Subclasses set `block`, and `norm` where the final norm is no RMS norm."""

    block: ClassVar[type[Block]]
    norm: ClassVar[type[RMSNorm] | type[LayerNorm]] = RMSNorm

    def __init__(self, config: ModelConfig, t: Tensors):
        c = config
        self.config, self.b = config, t.backend
        self.token_embd = t.weight("token_embd.weight", c.vocab_size, c.dim)
        ropes = layer_ropes(c, t)
        self.blk = [self.block(t.scope(f"blk.{i}."), c, i, ropes[i]) for i in range(c.n_layers)]
        self.output_norm = self.norm(t, "output_norm", c.norm_eps, c.dim)
        tied = "output.weight" not in t
        self.output = self.token_embd if tied else t.weight("output.weight", c.vocab_size, c.dim)
        self.output_bias = t.optional("output.bias", c.vocab_size)

    @staticmethod
    @abstractmethod
    def read_config(meta: Metadata) -> ModelConfig:
        """The architecture's constants from a file's metadata."""

    def embed(self, batch: Batch) -> Array:
        """What the first block reads: (n_tokens, dim)."""
        x = self.b.embed(self.token_embd, batch.ids)
        return x if self.config.embedding_scale == 1.0 else self.b.scale(x, self.config.embedding_scale)

    def hidden(self, batch: Batch, kv: Sequence[KVPages]) -> Array:
        """Hidden states after the final norm, of the rows `batch.output_rows`: (n_out, dim)."""
        x = self.embed(batch)
        last = self.blk[-1]
        for block, pages in zip(self.blk[:-1], kv[:-1], strict=True):
            x = block.feed(block.attend(x, batch, pages))
        x = self.b.take(last.attend(x, batch, kv[-1]), batch.output_rows)  # what comes after goes row by row
        return self.output_norm(last.feed(x))

    def forward(self, batch: Batch, kv: Sequence[KVPages]) -> Array:
        """Logits of the rows `batch.output_rows`: (n_out, vocab)."""
        logits = self.b.linear(self.hidden(batch, kv), self.output, self.output_bias)
        if self.config.logit_scale != 1.0 or self.config.logit_softcap:
            logits = self.b.scale(logits, self.config.logit_scale, self.config.logit_softcap)
        return logits
