"""Ling 1 (Ling-lite) and DeepSeek's first mixture: Llama's attention, q and k re-ordered like Llama's; experts as the
file says, softmax over all, and shared ones as one behind leading dense layers."""

from __future__ import annotations

from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.ernie4_5_moe import Block
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.mixture import MIXTURE_KEYS, mixture_config

__all__ = ["BailingMoE"]


class BailingMoE(Decoder):
    """Archs `bailingmoe` and `deepseek`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        return mixture_config(meta, base_config(meta, adjacent=True, computes=MIXTURE_KEYS), scoring="softmax")
