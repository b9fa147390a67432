"""Qwen 2 and 2.5: Llama's block with biases on q, k and v; halves rotate; often tied.

The text part of the vision model `qwen2vl` is the same: the three positions of a text's token are equal.
"""

from __future__ import annotations

from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.llama import Block
from edgellm.models.metadata import Metadata, base_config

__all__ = ["Qwen2"]


class Qwen2(Decoder):
    """Archs `qwen2` and `qwen2vl`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return base_config(meta, adjacent=False)
