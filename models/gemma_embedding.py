"""EmbeddingGemma: Gemma 3 as an encoder. Every token sees the whole text, in windowed layers half a window to either
side; two products may follow (`dense_2`, `dense_3`), before or behind pooling, which is a mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages
from edgellm.models.config import ModelConfig
from edgellm.models.encoder import PreNormEncoder
from edgellm.models.gemma3 import Block, Gemma3
from edgellm.models.layers import Linear
from edgellm.models.metadata import Metadata
from edgellm.models.tensors import Tensors

__all__ = ["GemmaEmbedding"]


class GemmaEmbedding(PreNormEncoder):
    """Arch `gemma-embedding`."""

    block = Block

    def __init__(self, config: ModelConfig, t: Tensors):
        super().__init__(config, t)
        wide = t.source["dense_2.weight"].shape[0] if "dense_2.weight" in t else 0
        self.dense_2 = Linear(t, "dense_2", wide, config.dim) if wide else None
        self.dense_3 = Linear(t, "dense_3", config.dim, wide) if wide else None

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = Gemma3.read_config(meta)
        windows = tuple(w // 2 + 1 if w else 0 for w in c.windows)
        return replace(c, causal=False, windows=windows, pooling=c.pooling or "mean")

    def hidden(self, batch: Batch, kv: Sequence[KVPages]) -> Array:
        x = super().hidden(batch, kv)
        return self.dense_3(self.dense_2(x)) if self.dense_2 and self.dense_3 else x
