"""MiniCPM 1, 2 and 4: Granite's block and factors on the embedding, on what each half adds and on the logits (stored as
a divisor); first files do not hold them, they are those of MiniCPM-2B then. q and k re-ordered like Llama's."""

from __future__ import annotations

import math
from dataclasses import replace

from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.granite import Block
from edgellm.models.metadata import Metadata, base_config

__all__ = ["MiniCPM"]


class MiniCPM(Decoder):
    """Arch `minicpm`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        n_layers, dim = meta.integer("block_count", low=1), meta.integer("embedding_length", low=1)
        c = base_config(
            meta,
            adjacent=True,
            embedding_scale=meta.number("embedding_scale", 12.0),
            residual_scale=meta.number("residual_scale", 1.4 / math.sqrt(n_layers)),
            logit_scale=1 / (meta.number("logit_scale", dim / 256, low=0) or 1.0),
        )
        # Files with LongRoPE's two tables need not say so.
        return replace(c, rope=replace(c.rope, scaling="longrope")) if c.rope.scaling == "none" else c
