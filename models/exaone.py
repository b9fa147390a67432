"""EXAONE 3 and 3.5 (and Deep): Llama's block; halves rotate, with Llama 3's frequency factors."""

from __future__ import annotations

from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.llama import Block
from edgellm.models.metadata import Metadata, base_config

__all__ = ["Exaone"]


class Exaone(Decoder):
    """Arch `exaone`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return base_config(meta, adjacent=False)
