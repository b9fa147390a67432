"""EuroBERT and Llama as an encoder (llama-embed): Llama's block, every token sees the whole text; in EuroBERT halves
rotate."""

from __future__ import annotations

from dataclasses import replace

from edgellm.models.config import ModelConfig
from edgellm.models.encoder import PreNormEncoder
from edgellm.models.llama import Block
from edgellm.models.metadata import Metadata, base_config

__all__ = ["EuroBert"]


class EuroBert(PreNormEncoder):
    """Archs `eurobert` and `llama-embed`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=meta.arch == "llama-embed", computes=("attention.causal",))
        return replace(c, causal=False, pooling=c.pooling or "mean")
