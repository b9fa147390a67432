"""Where the big vocabularies and real models lie, when they are there at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("EDGELLM_SHARED", Path(__file__).parents[3] / "shared"))
VOCABS = ("bert-bge", "deepseek-coder", "falcon", "gpt-2", "llama-spm", "phi-3", "qwen2")


def vocab_file(name: str) -> Path:
    """The vocabulary-only GGUF `name`, or a skip."""
    path = SHARED / "vocab" / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path} is not here (set EDGELLM_SHARED to the folder that holds vocab/)")
    return path


def answers(path: Path) -> list[tuple[str, list[int]]]:
    """Texts and their right ids, as the `.inp` and `.out` files beside a vocabulary give them."""
    texts = path.with_name(path.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_name(path.name + ".out").read_text().split("\n")
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=True)]
