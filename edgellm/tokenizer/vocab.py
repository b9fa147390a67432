"""The vocabulary as the file tells it: tokens, types, scores, special ids; checked once, so that the rest can trust it.

Rules for odd files: token texts that occur twice keep their first id for encoding (one warning); a special id outside
the vocabulary, a `scores` or `token_type` array of the wrong length, and `add_bos_token` without a BOS id are errors
that name the key.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edgellm.errors import TokenizerError

__all__ = ["BYTE", "CONTROL", "NORMAL", "UNKNOWN", "UNUSED", "USER_DEFINED", "Vocab", "array_of", "flag_of"]

log = logging.getLogger("edgellm")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

KINDS = {"llama": "spm", "gpt2": "bpe", "gemma4": "bpe", "bert": "wordpiece", "t5": "unigram"}

_MARKER = re.compile(r"<[|｜].+>$|<.+[|｜]>$")

# fmt: off
# Ends a turn whatever its type says: no text has these by chance.
_EOG_NAMES = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
))
# Also words of HTML or of plain prose: only when the file calls them control tokens.
_EOG_CONTROL_NAMES = frozenset((
    "</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[",
))
# Fill-in-the-middle and repository separators: the model is done with the file when it writes one.
_EOG_FIM_NAMES = frozenset((
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
))
# fmt: on


class Vocab:
    """Tokens as stored in the file, and what the file says about them.

    `types[id]` is one of the constants above. `bos_id` and the like are None when the model has none.
    """

    def __init__(self, metadata: Mapping[str, Any]):
        model = _text(metadata, "tokenizer.ggml.model")
        if model is None:
            raise TokenizerError("this file has no tokenizer (key tokenizer.ggml.model is absent)")
        if model not in KINDS:
            known = ", ".join(sorted(KINDS))
            raise TokenizerError(f"tokenizer.ggml.model is {model!r}, which edgellm does not know (it knows {known})")
        self.model: str = model
        self.kind = KINDS[model]
        self.pre = _text(metadata, "tokenizer.ggml.pre")
        self.tokens = _tokens(metadata)
        self.types = self._types(metadata)
        self.scores = self._scores(metadata)
        self.ids: dict[str, int] = self._ids()
        self.bos_id = self._special(metadata, "bos")
        self.eos_id = self._special(metadata, "eos")
        self.unk_id = self._special(metadata, "unknown")
        self.pad_id = self._special(metadata, "padding")
        self.sep_id = self._special(metadata, "separator", "seperator")
        self._defaults(metadata)
        self.add_space_prefix = flag_of(metadata, "tokenizer.ggml.add_space_prefix", self.kind in ("spm", "unigram"))
        self.remove_extra_whitespaces = flag_of(metadata, "tokenizer.ggml.remove_extra_whitespaces", False)
        self.eog_ids = self._eog(metadata)
        self.strip_right = self._strip_right(metadata)

    def _types(self, metadata: Mapping[str, Any]) -> list[int]:
        types = array_of(metadata, "tokenizer.ggml.token_type", int)
        if types is None:
            return [BYTE if _is_byte(token) else NORMAL for token in self.tokens]
        self._check_length("tokenizer.ggml.token_type", types)
        for i, kind in enumerate(types):
            # Markers such as DeepSeek's `<｜User｜>` are often marked user-defined, which plain text could spell.
            if kind == USER_DEFINED and _MARKER.match(self.tokens[i]):
                types[i] = CONTROL
            if kind == BYTE and not _is_byte(self.tokens[i]):
                types[i] = NORMAL
        return types

    def _scores(self, metadata: Mapping[str, Any]) -> list[float] | None:
        if self.kind not in ("spm", "unigram"):
            return None
        scores = array_of(metadata, "tokenizer.ggml.scores", float, int)
        if scores is None:
            raise TokenizerError(f"tokenizer.ggml.scores is absent, but {self.model!r} vocabularies need it")
        self._check_length("tokenizer.ggml.scores", scores)
        if not all(map(math.isfinite, scores)):
            raise TokenizerError("tokenizer.ggml.scores holds a value that is no finite number; the file is damaged")
        return scores

    def _check_length(self, key: str, values: Sequence[Any]) -> None:
        if len(values) != len(self.tokens):
            raise TokenizerError(f"{key} has {len(values)} entries for {len(self.tokens)} tokens; the file is damaged")

    def _ids(self) -> dict[str, int]:
        ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(ids) < len(self.tokens):
            ids = {}
            for i, token in enumerate(self.tokens):
                ids.setdefault(token, i)
            n = len(self.tokens) - len(ids)
            log.warning("tokenizer.ggml.tokens holds %d repeated texts; the first id of each is used", n)
        return ids

    def _special(self, metadata: Mapping[str, Any], *names: str) -> int | None:
        for name in names:
            key = f"tokenizer.ggml.{name}_token_id"
            value = metadata.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TokenizerError(f"{key} must be a whole number, not {value!r}")
            if value in (-1, 0xFFFFFFFF):  # how converters write "none"
                return None
            if not 0 <= value < len(self.tokens):
                raise TokenizerError(f"{key} is {value}, but the vocabulary has {len(self.tokens)} tokens")
            return value
        return None

    def _defaults(self, metadata: Mapping[str, Any]) -> None:
        """What each kind means when the file is silent."""
        if self.kind == "wordpiece":
            self.bos_id = _first(self._special(metadata, "cls"), self.bos_id, self.ids.get("[CLS]"))
            self.sep_id = _first(self.sep_id, self.eos_id, self.ids.get("[SEP]"))
            self.unk_id = _first(self.unk_id, self.ids.get("[UNK]"))
            if self.bos_id is None or self.sep_id is None or self.unk_id is None:
                raise TokenizerError("this bert vocabulary lacks one of [CLS], [SEP] and [UNK]")
        if self.kind == "spm":
            self.bos_id = _first(self.bos_id, self._control("<s>"))
            self.eos_id = _first(self.eos_id, self._control("</s>"))
        if self.kind == "unigram":
            self.eos_id = _first(self.eos_id, self._control("</s>"))
        if self.kind in ("spm", "unigram"):
            unknown = next((i for i, kind in enumerate(self.types) if kind == UNKNOWN), None)
            self.unk_id = _first(self.unk_id, unknown, self.ids.get("<unk>"))
        default_bos = self.kind in ("spm", "wordpiece") and self.bos_id is not None
        self.add_bos = self._flag(metadata, "bos", default_bos)
        self.add_eos = self._flag(metadata, "eos", self.kind == "unigram" and self.eos_id is not None)
        self.add_sep = self.kind == "wordpiece"

    def _flag(self, metadata: Mapping[str, Any], name: str, default: bool) -> bool:
        key = f"tokenizer.ggml.add_{name}_token"
        if metadata.get(key) is None:
            return default
        value = flag_of(metadata, key, default)
        if value and metadata.get(f"tokenizer.ggml.{name}_token_id") is None and self.kind != "wordpiece":
            raise TokenizerError(f"{key} is true, but tokenizer.ggml.{name}_token_id is absent")
        return value

    def _control(self, text: str) -> int | None:
        token = self.ids.get(text)
        return token if token is not None and self.types[token] == CONTROL else None

    def _eog(self, metadata: Mapping[str, Any]) -> frozenset[int]:
        """Ids that end the reply: the file's own, and those whose names say so. Such a token counts as a control
        token even where the file calls it a normal one."""
        found = {self.ids[name] for name in _EOG_NAMES if name in self.ids}
        for token in found:
            self.types[token] = CONTROL
        named = (self._control(name) for name in _EOG_CONTROL_NAMES | _EOG_FIM_NAMES)
        given = (self._special(metadata, name) for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
        found.update(token for token in (*named, *given, self.eos_id) if token is not None)
        # In the harmony format `<|end|>` only closes a channel; Gemma 4 keeps `</s>` as plain HTML.
        closers = {name for name in ("<|return|>", "<|call|>", "<|calls|>", "<|flush|>") if name in self.ids}
        if len(closers) > 1:
            found.discard(self.ids.get("<|end|>", -1))
        if "<|tool_response>" in self.ids:
            found.discard(self.ids.get("</s>", -1))
        return frozenset(found)

    def _strip_right(self, metadata: Mapping[str, Any]) -> frozenset[int]:
        """Phi-3's markers that swallow the white space behind them: all but three. The file has no key for it."""
        name = str(metadata.get("general.name", "")).lower()
        if self.kind != "spm" or not ("phi-3" in name or "phi3" in name):
            return frozenset()
        marks = (i for i, kind in enumerate(self.types) if kind in (CONTROL, UNKNOWN, USER_DEFINED))
        return frozenset(i for i in marks if self.tokens[i] not in ("<s>", "<unk>", "<|endoftext|>"))


def _first(*candidates: int | None) -> int | None:
    return next((c for c in candidates if c is not None), None)


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = array_of(metadata, "tokenizer.ggml.tokens", str)
    if not tokens:
        raise TokenizerError("this file has no vocabulary (key tokenizer.ggml.tokens is absent or empty)")
    return tokens


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{key} must be a text, not {type(value).__name__}")
    return value


def flag_of(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """A flag; the text `false` is none, and would count as true."""
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or value not in (0, 1):
        raise TokenizerError(f"{key} must be true or false, not {str(value)[:40]!r}")
    return bool(value)


def array_of(metadata: Mapping[str, Any], key: str, *kinds: type) -> list[Any] | None:
    """A plain list from whatever the loader gives for an array (a list, a lazy sequence or a numpy array)."""
    given = metadata.get(key)
    if given is None:
        return None
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
        raise TokenizerError(f"{key} must be an array, not {type(given).__name__}")
    values = list(given)
    wrong = set(map(type, values)) - set(kinds)
    if wrong:
        raise TokenizerError(f"{key} must hold {kinds[0].__name__} values only, but has {wrong.pop().__name__}")
    return values


def _is_byte(token: str) -> bool:
    return re.fullmatch("<0x[0-9A-Fa-f]{2}>", token) is not None
