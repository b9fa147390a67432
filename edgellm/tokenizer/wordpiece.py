"""WordPiece (`bert`) through the tokenizers library. GGUF writes `▁word` for a first piece and `ing` for `##ing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm.tokenizer.vocab import CONTROL, UNKNOWN, Vocab, flag_of

__all__ = ["WordPieceEncoder"]


class WordPieceEncoder:
    """Plain text to ids, without [CLS] and [SEP]. Words of more than 100 letters become [UNK], as in BERT."""

    def __init__(self, vocab: Vocab, metadata: Mapping[str, Any]):
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        pieces: dict[str, int] = {}
        for i, token in enumerate(vocab.tokens):
            if vocab.types[i] in (CONTROL, UNKNOWN) or i == vocab.unk_id:
                continue
            pieces.setdefault(token[1:] if token.startswith("▁") else "##" + token, i)
        assert vocab.unk_id is not None
        unknown = vocab.tokens[vocab.unk_id]
        pieces[unknown] = vocab.unk_id
        lowercase = flag_of(metadata, "tokenizer.ggml.normalizer.lowercase", True)
        accents = flag_of(metadata, "tokenizer.ggml.normalizer.strip_accents", lowercase)
        self._tokenizer = Tokenizer(models.WordPiece(pieces, unk_token=unknown, max_input_chars_per_word=100))
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=accents)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str, after_special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
