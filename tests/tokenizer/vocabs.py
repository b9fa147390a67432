"""Vocabularies for tests: SmolLM2's own (Apache-2.0, tests/data/tokenizer), and small ones trained by sentencepiece."""

from __future__ import annotations

import gzip
import io
import json
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece

DATA = Path(__file__).parents[1] / "data" / "tokenizer"
RUNS = ["\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "\t"]
"""User-defined tokens of the trained vocabularies, like Gemma's."""


@cache
def _smollm2() -> dict[str, Any]:
    return json.loads(gzip.decompress((DATA / "smollm2.json.gz").read_bytes()))


def smollm2(**changes: Any) -> dict[str, Any]:
    """Metadata of SmolLM2's tokenizer; `changes`: keys below `tokenizer.ggml.`, None removes one."""
    return changed(_smollm2(), **changes)


def changed(metadata: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with keys below `tokenizer.ggml.` set, or removed where the value is None."""
    result = dict(metadata)
    for name, value in changes.items():
        if value is None:
            result.pop(f"tokenizer.ggml.{name}", None)
        else:
            result[f"tokenizer.ggml.{name}"] = value
    return result


@cache
def _train(kind: str) -> bytes:
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / name).read_text("utf-8") for name in ("argparse.py", "datetime.py", "textwrap.py"))
    text += "Zürich naïve 日本語 приве́т " * 50
    model = io.BytesIO()
    gemma = {
        "model_type": "bpe",
        "byte_fallback": True,
        "split_digits": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "user_defined_symbols": RUNS,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "control_symbols": ["<start_of_turn>", "<end_of_turn>"],
    }
    t5 = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        vocab_size=900,
        character_coverage=0.9995,
        minloglevel=2,
        **(gemma if kind == "spm" else t5),
    )
    return model.getvalue()


def trained(kind: str) -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    """A freshly trained library tokenizer (`spm`: Gemma's settings; `unigram`: T5's) and its GGUF metadata."""
    proto = _train(kind)
    library = sentencepiece.SentencePieceProcessor(model_proto=proto)
    ids = range(library.vocab_size())
    pieces = [library.id_to_piece(i) for i in ids]
    types = [
        2 if library.is_unknown(i)
        else 6 if library.is_byte(i)
        else 3 if library.is_control(i)
        else 4 if pieces[i] in RUNS and kind == "spm"
        else 1
        for i in ids
    ]  # fmt: skip
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if kind == "spm" else "t5",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [library.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.eos_token_id": library.eos_id(),
        "tokenizer.ggml.unknown_token_id": library.unk_id(),
        "tokenizer.ggml.padding_token_id": library.pad_id(),
        "tokenizer.ggml.add_space_prefix": kind == "unigram",
    }
    if kind == "spm":
        metadata |= {"tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.add_bos_token": True}
    else:
        metadata["tokenizer.ggml.precompiled_charsmap"] = list(_field(_field(proto, 3), 2))
        metadata["tokenizer.ggml.remove_extra_whitespaces"] = True
    return library, metadata


def _field(proto: bytes, wanted: int) -> bytes:
    """The last length-delimited field `wanted` of a protobuf message."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (proto[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if proto[at - 1] < 128:
                return value, at

    at, found = 0, b""
    while at < len(proto):
        tag, at = varint(at)
        if tag & 7 == 2:
            size, at = varint(at)
            found = proto[at : at + size] if tag >> 3 == wanted else found
            at += size
        elif tag & 7 == 0:
            _, at = varint(at)
        else:
            at += 4 if tag & 7 == 5 else 8
    return found
