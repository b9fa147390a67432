"""ERNIE 4.5 (dense): Llama's block with optional biases; adjacent pairs rotate."""

from __future__ import annotations

from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.llama import Block
from edgellm.models.metadata import Metadata, base_config

__all__ = ["Ernie45"]


class Ernie45(Decoder):
    """Arch `ernie4_5`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return base_config(meta, adjacent=True)
