"""SentencePiece vocabularies (`llama`: merges by score; `t5`: Unigram) through the sentencepiece library.

A GGUF file holds the pieces, scores and types of the model but not the model itself, so its protobuf is written anew.
Field numbers are those of sentencepiece_model.proto: ModelProto {1: pieces, 2: trainer_spec, 3: normalizer_spec},
SentencePiece {1: piece, 2: score, 3: type}.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from edgellm.errors import TokenizerError
from edgellm.tokenizer.vocab import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocab

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

__all__ = ["SPACE", "SPMEncoder", "model_proto"]

SPACE = "▁"
_UNIGRAM, _BPE = 1, 2


class SPMEncoder:
    """Plain text to ids. Control tokens are never produced; user-defined ones are found by the library itself.

    A literal `▁` in the text would read as a space; where the vocabulary has byte tokens it is spelled in bytes
    instead, so that decoding gives the text back.
    """

    def __init__(self, vocab: Vocab, charsmap: bytes = b""):
        from sentencepiece import SentencePieceProcessor

        self._processor: SentencePieceProcessor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model_proto(vocab, charsmap))
        except RuntimeError as error:
            raise TokenizerError(f"sentencepiece does not take this vocabulary: {error}") from error
        # Unigram models leave the leading blank to the library, which first drops extra blanks.
        self.prefix = " " if vocab.add_space_prefix and vocab.kind == "spm" else ""
        spelled = [vocab.ids.get(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self._spelled_space = (
            [i for i in spelled if i is not None] if vocab.kind == "spm" and None not in spelled else []
        )

    def encode(self, text: str, after_special: bool) -> list[int]:
        """`after_special`: at the start of the text or right behind a control token, where the space prefix goes."""
        if after_special:
            text = self.prefix + text
        if SPACE not in text or not self._spelled_space:
            return list(self._processor.EncodeAsIds(text))
        ids: list[int] = []
        for i, part in enumerate(text.split(SPACE)):
            if i:
                ids += self._spelled_space
            ids += self._processor.EncodeAsIds(part)
        return ids


def model_proto(vocab: Vocab, charsmap: bytes = b"") -> bytes:
    """The serialised ModelProto for `vocab` (kind `spm` or `unigram`)."""
    assert vocab.scores is not None
    types = _library_types(vocab)
    out = bytearray()
    pack = struct.Struct("<f").pack
    seen: set[str] = set()
    for i, (piece, score, kind) in enumerate(zip(vocab.tokens, vocab.scores, types, strict=True)):
        if kind == USER_DEFINED:
            piece = piece.replace(" ", SPACE)
        if not piece or piece in seen:  # the library wants every piece once
            piece, kind = f"\x01{i}", UNUSED
        seen.add(piece)
        text = piece.encode("utf-8", "surrogateescape")
        size = len(text)
        head = b"\x0a%c" % size if size < 128 else b"\x0a" + _varint(size)
        body = head + text + b"\x15" + pack(score)
        if kind != NORMAL:
            body += b"\x18%c" % kind
        size = len(body)
        out += (b"\x0a%c" % size if size < 128 else b"\x0a" + _varint(size)) + body
    byte_fallback = any(kind == BYTE for kind in types)
    trainer = _int(3, _UNIGRAM if vocab.kind == "unigram" else _BPE) + _int(35, byte_fallback)
    trainer += _int(40, types.index(UNKNOWN)) + _int(41, -1) + _int(42, -1) + _int(43, -1)
    dummy_prefix = vocab.kind == "unigram" and vocab.add_space_prefix
    normalizer = _bytes(2, charsmap) + _int(3, dummy_prefix) + _int(4, vocab.remove_extra_whitespaces) + _int(5, True)
    return bytes(out + _bytes(2, trainer) + _bytes(3, normalizer))


def _library_types(vocab: Vocab) -> list[int]:
    """Token types as the library accepts them: exactly one unknown token, and all 256 byte tokens or none."""
    types = list(vocab.types)
    all_bytes = len({vocab.tokens[i] for i, kind in enumerate(types) if kind == BYTE}) == 256
    unknown = vocab.unk_id if vocab.unk_id is not None else 0
    for i, kind in enumerate(types):
        if kind == UNKNOWN or not NORMAL <= kind <= BYTE or (kind == BYTE and not all_bytes):
            types[i] = UNUSED
        if kind == NORMAL and i in vocab.eog_ids:
            types[i] = CONTROL
    types[unknown] = UNKNOWN
    return types


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
