"""Mistral 3 (Ministral 3, Mistral Small 3.1 and later; the text part): Llama's block with YaRN.

Ministral scales q by 1 + beta log(1 + floor(position / original context)), which is 1 before the original context's
end. There our context ends, as no op scales by position.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.llama import Block
from edgellm.models.metadata import Metadata, base_config

__all__ = ["Mistral3"]


class Mistral3(Decoder):
    """Arch `mistral3`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=True)
        log_factor = 0.1 * math.log(c.rope.factor) if c.rope.factor > 1 else 0.0
        # YaRN's mscale is 1 here and the file has mscale_all_dim: their magnitudes are divided (transformers).
        magnitude = (1 + log_factor) / (1 + log_factor * meta.number("rope.scaling.yarn_log_multiplier", 0.0, low=0))
        beta = meta.number("attention.temperature_scale", 0.0)
        context = min(c.context_length, c.rope.original_context) if beta else c.context_length
        return replace(c, rope=replace(c.rope, yarn_magnitude=magnitude), context_length=context)
