"""Qwen 1: Llama's block with q, k and v in one tensor, with biases; halves rotate. The file's `feed_forward_length`
counts gate and up together."""

from __future__ import annotations

from dataclasses import replace

from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.llama import Block
from edgellm.models.metadata import Metadata, base_config

__all__ = ["Qwen"]


class Qwen(Decoder):
    """Arch `qwen`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False)
        return replace(c, ffn_dim=c.ffn_dim // 2)
