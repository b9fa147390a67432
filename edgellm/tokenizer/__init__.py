"""Tokenizers from GGUF metadata: BPE, SentencePiece (merges and Unigram) and WordPiece, and their way back to text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from edgellm.tokenizer.stream import StreamDecoder
from edgellm.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer", "from_gguf", "from_metadata"]


def from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that GGUF keys and values describe. Raises TokenizerError."""
    return Tokenizer.from_metadata(metadata)


def from_gguf(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a GGUF file, without its weights. Raises GGUFError, TokenizerError."""
    from edgellm.loader import open_gguf

    with open_gguf(path) as gguf:
        return Tokenizer.from_metadata(dict(gguf.metadata))
