"""Cohere 2 (Command R7B, Command A): Command R's block; three of four layers are windowed, and only they rotate."""

from __future__ import annotations

from dataclasses import replace

from edgellm.models.command_r import Block
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import LayerNorm
from edgellm.models.metadata import Metadata, base_config, layer_windows, local_rope

__all__ = ["Cohere2"]


class Cohere2(Decoder):
    """Arch `cohere2`."""

    block, norm = Block, LayerNorm

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=True, layer_norm=True, logit_scale=meta.number("logit_scale", 1.0))
        windows = layer_windows(meta, c.n_layers, period=4)
        local = local_rope(meta, c.rope, c.rope.base)
        return replace(c, windows=windows, rope_layers=tuple(w > 0 for w in windows), rope_local=local)
