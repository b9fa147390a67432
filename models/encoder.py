"""Encoders in a decoder's frame: blocks with their norms in front and a final norm; rows see what comes after them."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.backends.base import Array, Batch, KVPages
from edgellm.errors import UnsupportedModel
from edgellm.models.decoder import Decoder

__all__ = ["PreNormEncoder"]


class PreNormEncoder(Decoder):
    """Gives hidden states only."""

    def forward(self, batch: Batch, kv: Sequence[KVPages]) -> Array:
        """An encoder has no next token: raises UnsupportedModel."""
        raise UnsupportedModel(f"{self.config.arch} models embed texts and cannot generate; use embed")
