"""Text to token ids and back, for every kind of vocabulary a GGUF file can hold."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol

from edgellm.errors import RequestError
from edgellm.tokenizer.bpe import BPEEncoder, byte_letters, rule_for
from edgellm.tokenizer.special import TokenMatcher
from edgellm.tokenizer.spm import SPACE, SPMEncoder
from edgellm.tokenizer.stream import StreamDecoder
from edgellm.tokenizer.vocab import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocab, array_of
from edgellm.tokenizer.wordpiece import WordPieceEncoder

__all__ = ["Tokenizer"]


class _Encoder(Protocol):
    def encode(self, text: str, after_special: bool) -> list[int]: ...


class Tokenizer:
    """The model's own tokenizer, rebuilt from the file's metadata.

    `tokens`: texts as stored in the file. `add_bos`: whether `encode` puts `bos_id` first by itself. `eog_ids`: every
    id that ends a reply. The libraries behind it are loaded at the first `encode`.
    """

    def __init__(self, metadata: Mapping[str, Any]):
        vocab = self._vocab = Vocab(metadata)
        self._metadata = metadata
        self.tokens = vocab.tokens
        self.vocab_size = len(vocab.tokens)
        self.bos_id, self.eos_id = vocab.bos_id, vocab.eos_id
        self.unk_id, self.pad_id = vocab.unk_id, vocab.pad_id
        self.eog_ids = vocab.eog_ids
        self.add_bos = vocab.add_bos
        self.kind = vocab.kind
        self._rule = rule_for(vocab) if vocab.kind == "bpe" else None
        self._pieces: dict[int, bytes] = {}
        self._raw_pieces = self._rule is None or self._rule.raw
        if self._rule is not None and metadata.get("tokenizer.ggml.add_bos_token") is None:
            self.add_bos = self._rule.add_bos and self.bos_id is not None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From GGUF keys and values. Raises TokenizerError with the key that is wrong."""
        return cls(metadata)

    # -- text to ids

    def encode(self, text: str, special: bool = False, bos: bool | None = None) -> list[int]:
        """`special`: control tokens spelled in the text become their ids; otherwise no text can become one.

        `bos`: None adds what the model asks for ([CLS] and [SEP], BOS, EOS); True adds BOS as well where the model does
        not ask; False adds nothing. A text that begins with the BOS token (`special`) does not get a second one.
        Text right behind a control token gets the space prefix of SPM models again, as in llama.cpp.
        """
        matcher = self._all_specials if special else self._user_defined
        ids = self._encode_parts(matcher.split(text))
        vocab = self._vocab
        if bos is False:
            return ids
        if (self.add_bos or bos) and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if vocab.add_sep and vocab.sep_id is not None:
            ids.append(vocab.sep_id)
        elif vocab.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def split_specials(self, text: str) -> list[str | int]:
        """`text` cut into plain stretches and the ids of the control tokens it names."""
        return list(self._all_specials.split(text))

    def encode_guarded(self, text: str, restore: Callable[[str], str]) -> list[int]:
        """Ids of `text` with its control tokens parsed, where `restore` gives the text between them its true letters:
        what it brings back is never parsed. For chat templates; adds nothing by itself."""
        parts: list[str | int] = []
        for part in self._all_specials.split(text):
            parts.extend((part,) if isinstance(part, int) else self._user_defined.split(restore(part)))
        return self._encode_parts(parts)

    def _encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        ids: list[int] = []
        after_special, strip = True, False
        try:
            for part in parts:
                if isinstance(part, int):
                    ids.append(part)
                    after_special = True
                    strip = part in self._vocab.strip_right
                    continue
                part = part.lstrip() if strip else part
                if part:
                    ids += self._encoder.encode(part, after_special)
                    after_special = strip = False
        except UnicodeEncodeError as error:
            raise RequestError(f"the text holds half a surrogate pair at position {error.start}: no Unicode") from error
        return ids

    @cached_property
    def _encoder(self) -> _Encoder:
        vocab, metadata = self._vocab, self._metadata
        if self._rule is not None:
            return BPEEncoder(vocab, self._rule, metadata)
        if vocab.kind == "wordpiece":
            return WordPieceEncoder(vocab, metadata)
        charsmap = array_of(metadata, "tokenizer.ggml.precompiled_charsmap", int) or []
        return SPMEncoder(vocab, bytes(c & 255 for c in charsmap))

    def _matcher(self, *kinds: int) -> TokenMatcher:
        vocab = self._vocab
        found = {vocab.tokens[i]: i for i, kind in enumerate(vocab.types) if kind in kinds and vocab.tokens[i]}
        if self._raw_pieces:  # runs of blanks are stored as `▁▁`, texts hold blanks
            found = {text.replace(SPACE, " "): i for text, i in found.items()}
        return TokenMatcher(found)

    @cached_property
    def _all_specials(self) -> TokenMatcher:
        if self.kind in ("spm", "unigram"):  # sentencepiece finds the user-defined ones
            return self._matcher(CONTROL, UNKNOWN)
        return self._matcher(CONTROL, UNKNOWN, USER_DEFINED)

    @cached_property
    def _user_defined(self) -> TokenMatcher:
        return TokenMatcher({}) if self.kind in ("spm", "unigram") else self._matcher(USER_DEFINED)

    # -- ids to text

    def token_bytes(self, token: int) -> bytes:
        """What the token stands for in the text; for control tokens, their name. IndexError outside the vocabulary."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token)
        return piece

    def _piece(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise IndexError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        text, kind = self.tokens[token], self._vocab.types[token]
        if kind in (CONTROL, UNKNOWN):
            return _utf8(text)
        if kind == BYTE:
            return bytes((int(text[3:5], 16),))
        if self._raw_pieces:
            return _utf8(text.replace(SPACE, " "))
        if kind == USER_DEFINED:
            return _utf8(text)
        letters = byte_letters()
        try:
            return bytes([letters[letter] for letter in text])
        except KeyError:
            return _utf8(text)

    def is_control(self, token: int) -> bool:
        """Whether the token is a marker of the model (control or unknown) and not text."""
        return self._vocab.types[token] in (CONTROL, UNKNOWN)

    @cached_property
    def control_texts(self) -> list[str]:
        """The names of all control tokens."""
        kinds = self._vocab.types
        return [text for text, kind in zip(self.tokens, kinds, strict=True) if kind in (CONTROL, UNKNOWN) and text]

    def token_id(self, text: str) -> int | None:
        """The id of the token stored as `text`, if there is one."""
        return self._vocab.ids.get(text)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`; control tokens are left out unless `special`. A space prefix is taken off once."""
        piece = self.token_bytes if special else self._visible_bytes
        data = b"".join(map(piece, ids))
        if self._strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def stream_decoder(self, after: int | None = None, show: Container[int] = ()) -> StreamDecoder:
        """Decoder for tokens that follow `after` (None: the start of a text, which like a control token before it
        means that a space prefix is taken off). `show`: control tokens whose names are text here, for parsers."""
        strip = self._strips_first_space and (after is None or self.is_control(after))
        return StreamDecoder(lambda token: self._visible_bytes(token, show), strip)

    def _visible_bytes(self, token: int, show: Container[int] = ()) -> bytes:
        if self.is_control(token) and token not in show:
            return b""
        return self.token_bytes(token)

    @property
    def _strips_first_space(self) -> bool:
        return self._vocab.add_space_prefix or self.kind == "wordpiece"


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
