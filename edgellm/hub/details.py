"""What a stored model's header says, in the words of Ollama's config blobs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgellm.errors import EdgeLLMError
from edgellm.hub.choice import quant_label
from edgellm.loader import open_gguf
from edgellm.loader.header import TensorInfo

__all__ = ["config_bytes", "file_type", "parameter_count", "parameter_text"]


def parameter_count(tensors: Sequence[TensorInfo]) -> int:
    """Weights in all tensors."""
    return sum(math.prod(info.shape) for info in tensors)


def parameter_text(count: int) -> str:
    """`1.24B`, `134.52M`, as Ollama writes it."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            text = f"{count / unit:.2f}" if unit < 10**9 else f"{count / unit:.1f}"
            return f"{text}{name}"
    return str(count)


def file_type(tensors: Sequence[TensorInfo]) -> str:
    """The type that most bytes of the file have: an honest name where the file's name tells none."""
    sizes: Counter[str] = Counter()
    for info in tensors:
        sizes[info.type.name] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else ""


def config_bytes(paths: Sequence[Path], file_name: str) -> bytes:
    """A config blob for a model whose files are here. A header that cannot be read leaves fields out."""
    config: dict[str, Any] = {"model_format": "gguf", "architecture": "amd64", "os": "linux"}
    label = quant_label(file_name) if file_name else ""
    try:
        with open_gguf(list(paths)) as model:
            infos = list(model.tensors.infos())
            config["model_family"] = model.architecture
            config["model_families"] = [model.architecture]
            config["model_type"] = parameter_text(parameter_count(infos))
            config["file_type"] = label if label and f"{label}.gguf" != file_name else file_type(infos)
    except EdgeLLMError:
        config["file_type"] = label
    return json.dumps(config).encode()
