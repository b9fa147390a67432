"""What clients are told of a model file, from its header alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from edgellm.chat.template import ChatTemplate
from edgellm.hub.details import file_type, parameter_count, parameter_text
from edgellm.loader import open_gguf
from edgellm.server.catalog import ModelDetails
from edgellm.tokenizer import Tokenizer

__all__ = ["SHORT_ARRAY", "read_details", "read_metadata"]

SHORT_ARRAY = 5
"""Longest array that is shown without being asked for: a vocabulary is megabytes of JSON."""
_FIM_KEYS = ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id")
_FIM_TOKENS = {
    "<|fim_prefix|>",
    "<fim_prefix>",
    "<fim-prefix>",
    "<｜fim▁begin｜>",
    "<|code_prefix|>",
    "▁<PRE>",
    "<PRE>",
}
_FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
    **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
    **{19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL"},
    **{26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0"},
    **{37: "TQ2_0", 38: "MXFP4_MOE"},
}
"""`general.file_type`, as GGUF writers number it."""


def read_metadata(path: Path, longest: int | None = None) -> dict[str, Any]:
    """A file's metadata as plain values; arrays longer than `longest` as empty lists."""
    with open_gguf(path) as gguf:
        return _plain(gguf.metadata, longest)


def read_details(path: Path, template: str | None = None) -> ModelDetails:
    """Reads the file's header. `template`: a stored one that replaces the file's own. Raises GGUFError."""
    with open_gguf(path) as gguf:
        metadata = _plain(gguf.metadata, SHORT_ARRAY)
        tokens = gguf.metadata.get("tokenizer.ggml.tokens")
        tokens = tokens if isinstance(tokens, Sequence) else ()
        infills = any(key in gguf.metadata for key in _FIM_KEYS) or not _FIM_TOKENS.isdisjoint(tokens)
        infos = list(gguf.tensors.infos())
    architecture = str(metadata.get("general.architecture", "unknown"))
    own = metadata.get("tokenizer.chat_template")
    kind = _whole(metadata.get("general.file_type"), -1)
    return ModelDetails(
        metadata=metadata,
        family=architecture,
        parameter_size=parameter_text(parameter_count(infos)),
        quantization_level=_FILE_TYPES.get(kind) or file_type(infos) or "unknown",
        parameter_count=parameter_count(infos),
        context_length=_whole(metadata.get(f"{architecture}.context_length")),
        embedding_length=_whole(metadata.get(f"{architecture}.embedding_length")),
        chat_template=own if isinstance(own, str) else "",
        capabilities=_capabilities(metadata, architecture, template, infills),
    )


def _capabilities(
    metadata: Mapping[str, Any], architecture: str, template: str | None, infills: bool
) -> tuple[str, ...]:
    if f"{architecture}.pooling_type" in metadata:
        return ("embedding",)
    # Asked for what its text knows only; a tokenizer is needed to render, not for that.
    chat = ChatTemplate.from_metadata(metadata, cast(Tokenizer, None), source=template)
    found = ["completion"]
    found += ["tools"] if chat.supports_tools and not chat.is_fallback else []
    found += ["insert"] if infills else []
    found += ["thinking"] if chat.supports_thinking else []
    return tuple(found)


def _whole(value: Any, default: int = 0) -> int:
    """A number as the file has it; a file may hold anything under any key."""
    return value if isinstance(value, int) else default


def _plain(metadata: Mapping[str, Any], longest: int | None) -> dict[str, Any]:
    """Values that JSON can hold; numbers that are none (NaN, infinity) become None."""
    return {key: _value(metadata[key], longest) for key in metadata}


def _value(value: Any, longest: int | None) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (bool, int)):
        return value
    return [_value(item, longest) for item in value] if longest is None or len(value) <= longest else []
