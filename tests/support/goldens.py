"""Where reference numbers lie: small ones in tests/data, the big shared set beside the repository when it is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

__all__ = ["DATA", "DECODERS", "ENCODERS", "Golden", "shared_goldens"]

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
ENCODERS = ["bert", "eurobert", "gemma-embedding", "llama-embed", "modern-bert", "nomic-bert", "nomic-bert-moe"]
DECODERS = sorted(folder.name for folder in (DATA / "goldens").iterdir() if folder.name not in ENCODERS)
"""Models in tests/data/goldens, made by tests/golden_tools; each also runs in llama.cpp, see `Case.llamacpp` there."""


def shared_goldens() -> Path | None:
    """The folder `goldens` of the shared set: $EDGELLM_SHARED, else ../shared beside the repository."""
    shared = Path(os.environ.get("EDGELLM_SHARED", ROOT.parent / "shared"))
    return shared / "goldens" if (shared / "goldens").is_dir() else None


class Golden:
    """One model with its reference logits: `ids(i)`, `logits(i)` for three sequences, and a greedy continuation."""

    def __init__(self, name: str, root: Path | None = None):
        """`root`: a folder of models; None: the shared set, and the test is skipped when it is not here."""
        root = root or shared_goldens()
        if root is None:
            pytest.skip("the shared goldens are not here (../shared, or set EDGELLM_SHARED)")
        folder = root / name
        self.name, self.folder = name, folder
        self.z: Any = np.load(folder / "golden.npz")

    def path(self, kind: str = "f16") -> Path:
        """The model file of one weight type."""
        return self.folder / f"{self.name}-{kind}.gguf"

    def ids(self, i: int) -> list[int]:
        return [int(x) for x in self.z[f"ids_{i}"]]

    def logits(self, i: int, variant: str = "") -> np.ndarray:
        """float32 (len, vocab); those of a variant where they differ from the main ones."""
        key = f"{variant}_logits_{i}" if variant else f"logits_{i}"
        return self.z[key if key in self.z else f"logits_{i}"]

    @property
    def prompt(self) -> list[int]:
        return [int(x) for x in self.z["greedy_prompt"]]

    @property
    def greedy(self) -> list[int]:
        return [int(x) for x in self.z["greedy_ids"]]

    def quant_types(self) -> list[str]:
        """The quantised files that come with this model."""
        return sorted({key.split(".")[0] for key in np.load(self.folder / "quant_golden.npz")})

    def dequant_logits(self, kind: str, i: int) -> np.ndarray:
        """transformers on the dequantised weights of one quantised file; of sequence 2 the last 8 rows only."""
        return np.load(self.folder / "quant_golden.npz")[f"{kind}.dequant_{i}"]
