"""Byte-level BPE (`gpt2`) and BPE over SentencePiece-style pieces (`gemma4`) through the tokenizers library."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from edgellm.errors import TokenizerError
from edgellm.tokenizer.pre import RULES, PreRule
from edgellm.tokenizer.vocab import CONTROL, Vocab, array_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["BPEEncoder", "byte_letters", "rule_for"]

log = logging.getLogger("edgellm")
_MERGES = "tokenizer.ggml.merges"
_CJK_PART = 1024
_CJK_RUN = re.compile(rf"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3]{{{2 * _CJK_PART},}}")


def rule_for(vocab: Vocab) -> PreRule:
    """The splitting rule the file names. A file without the key gets llama.cpp's default and one warning."""
    if vocab.model == "gemma4":
        return RULES["gemma4"]
    if vocab.pre is None:
        log.warning("tokenizer.ggml.pre is absent from this file: text is split by the default rule, ids may be off")
        return RULES["default"]
    if vocab.pre not in RULES:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {vocab.pre!r}, a splitting rule edgellm does not know; "
            "a newer edgellm or a converted file with a known rule is needed"
        )
    return RULES[vocab.pre]


class BPEEncoder:
    """Plain text to ids; control tokens are kept out of the library's vocabulary, so no text can become one.

    Some byte-level vocabularies lack bytes (SmolLM2: 0xF1, 0xF2 and a few control codes). The library, like llama.cpp,
    would drop them in silence; here a character that needs one becomes U+FFFD.
    """

    def __init__(self, vocab: Vocab, rule: PreRule, metadata: Mapping[str, Any]):
        merges = array_of(metadata, _MERGES, str)
        if merges is None:
            raise TokenizerError(f"{_MERGES} is absent, but {vocab.model!r} vocabularies need it")
        self._raw = rule.raw
        self._metadata = metadata
        self._ids = vocab.ids
        self._unk_id = vocab.unk_id
        with _no_collection():
            self._tokenizer = _build(vocab, rule, _pairs(merges))
        letters = {} if rule.raw else byte_letters()
        self._missing = bytes(byte for letter, byte in letters.items() if letter not in vocab.ids)

    def encode(self, text: str, after_special: bool) -> list[int]:
        """`after_special` means nothing to BPE: it has no space prefix."""
        if not self._raw:
            parts = self._cut(self._spellable(text))
            return [i for part in parts for i in self._tokenizer.encode(part, add_special_tokens=False).ids]
        ids: list[int] = []
        for part in re.split("(▁)", text):
            if part == "▁":  # a literal one; written as a piece it would read as a space
                ids += self._spelled(part)
            elif part:
                ids += self._encode_raw(part)
        return ids

    def _spellable(self, text: str) -> str:
        data = text.encode() if self._missing else b""
        if len(data.translate(None, self._missing)) == len(data):
            return text
        missing = set(self._missing)
        return "".join(letter if missing.isdisjoint(letter.encode()) else "\ufffd" for letter in text)

    def _cut(self, text: str) -> Iterator[str]:
        """Cuts endless runs of CJK letters, which are one word, where no merge can join the two sides: the same ids,
        but words that fit the processor's cache."""
        begin = 0
        for run in _CJK_RUN.finditer(text) if len(text) > _CJK_PART else ():
            cuts = range(run.start() + _CJK_PART, run.end(), _CJK_PART)
            for cut in cuts:
                left, right = (self._letters(text[cut - 1]), self._letters(text[cut]))
                if (left[-1], right[0]) not in self._joined:
                    yield text[begin:cut]
                    begin = cut
        yield text[begin:]

    def _letters(self, text: str) -> str:
        return "".join(self._letter_of[byte] for byte in text.encode())

    @cached_property
    def _letter_of(self) -> dict[int, str]:
        return {byte: letter for letter, byte in byte_letters().items()}

    @cached_property
    def _joined(self) -> frozenset[tuple[str, str]]:
        """The byte letters that merges bring together: the last of the left piece, the first of the right one."""
        merges = array_of(self._metadata, _MERGES, str) or []
        return frozenset((left[-1], right[0]) for left, right in _pairs(merges))

    def _encode_raw(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in re.split(r"(\n+)", text.replace(" ", "▁")):
            whole = self._ids.get(part) if part.startswith("\n") else None
            if whole is not None:
                ids.append(whole)
            elif part:
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
        return ids

    def _spelled(self, text: str) -> list[int]:
        ids = [self._ids.get(f"<0x{byte:02X}>", self._unk_id) for byte in text.encode()]
        return [i for i in ids if i is not None]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hundreds of thousands of new tuples set off the garbage collector again and again: a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[Any] = [tuple(entry.split(" ")) for entry in merges]
    for i, pair in enumerate(pairs):
        if len(pair) != 2 or not pair[0] or not pair[1]:
            left, found, right = merges[i][1:].partition(" ")  # a piece may begin with a blank
            if not found or not right or right.startswith(" "):
                raise TokenizerError(f"{_MERGES} entry {i} is {merges[i]!r}, not two pieces with a blank between")
            pairs[i] = (merges[i][0] + left, right)
    return pairs


def _build(vocab: Vocab, rule: PreRule, pairs: list[tuple[str, str]]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    known = {token: i for token, i in vocab.ids.items() if vocab.types[i] != CONTROL}
    options: dict[str, Any] = {"ignore_merges": rule.ignore_merges}
    if rule.raw and vocab.unk_id is not None:
        options |= {"byte_fallback": True, "unk_token": vocab.tokens[vocab.unk_id]}
        known[vocab.tokens[vocab.unk_id]] = vocab.unk_id
    try:
        model = models.BPE(known, pairs, **options)
    except Exception:
        # The library takes neither merges of pieces that are no tokens nor tokens that are no Unicode.
        known = {token: i for token, i in known.items() if _is_unicode(token)}
        usable = [(a, b) for a, b in pairs if a in known and b in known and a + b in known]
        n_left = len(pairs) - len(usable)
        log.warning("%s: %d entries join pieces outside the vocabulary and are left out", _MERGES, n_left)
        if options.get("unk_token") not in known:
            options.pop("unk_token", None)
        model = models.BPE(known, usable, **options)
    tokenizer = Tokenizer(model)
    if not rule.raw:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    return tokenizer


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


@cache
def byte_letters() -> Mapping[str, int]:
    """GPT-2's printable letter for each byte: itself where it prints, else the next free code point from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in printable]
    letters.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return letters
