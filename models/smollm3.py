"""SmolLM 3: Llama's block, q and k re-ordered like Llama's; every fourth layer has no rotation (NoPE). The file does
not say which."""

from __future__ import annotations

from dataclasses import replace

from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.llama import Block
from edgellm.models.metadata import Metadata, base_config

__all__ = ["SmolLM3"]


class SmolLM3(Decoder):
    """Arch `smollm3`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=True)
        return replace(c, rope_layers=tuple((i + 1) % 4 != 0 for i in range(c.n_layers)))
