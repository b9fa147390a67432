"""GPT-2 and StarCoder 1: a learned vector per position in place of rotation, layer norms and biases everywhere, an MLP
without a gate (tanh GELU), tied; StarCoder has one head of k and v."""

from __future__ import annotations

from dataclasses import replace

from edgellm.backends.base import Array, Batch
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import LayerNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.starcoder2 import Block
from edgellm.models.tensors import Tensors

__all__ = ["GPT2"]


class GPT2(Decoder):
    """Archs `gpt2` and `starcoder`."""

    block, norm = Block, LayerNorm

    def __init__(self, config: ModelConfig, t: Tensors):
        super().__init__(config, t)
        self.position_embd = t.weight("position_embd.weight", config.context_length, config.dim)

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False, layer_norm=True, position_table=True)
        return replace(c, rope_layers=(False,) * c.n_layers)

    def embed(self, batch: Batch) -> Array:
        return self.b.add(super().embed(batch), self.b.embed(self.position_embd, batch.positions))
