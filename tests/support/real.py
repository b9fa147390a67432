"""Real model files and what llama.cpp said about them. Where they lie: EDGELLM_TEST_MODELS, else the demo's place in
the store."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

__all__ = ["Agreement", "agreement", "real_cases", "real_model", "real_text"]

DATA = Path(__file__).resolve().parents[1] / "data" / "real"


def real_model(name: str) -> Path:
    """The file `name` (such as smollm2.gguf); skips the test when it is nowhere."""
    folder = os.environ.get("EDGELLM_TEST_MODELS")
    if folder and (Path(folder) / name).exists():
        return Path(folder) / name
    if name == "smollm2.gguf":
        from edgellm.hub.names import parse_name
        from edgellm.hub.store import Store

        stored = Store().get(parse_name("demo"))
        if stored is not None:
            return stored.path
    pytest.skip(f"{name} is not here: python -m tests.support.fetch_models FOLDER, then set EDGELLM_TEST_MODELS")


def real_cases(name: str) -> list[dict[str, Any]]:
    """llama.cpp's answers for one model: `prompt`, `prompt_tokens`, `tokens`, `top5` per step."""
    cases: list[dict[str, Any]] = json.loads((DATA / name).read_text(encoding="utf-8"))["cases"]
    return cases


def real_text() -> str:
    """27,000 bytes of English for perplexity."""
    return (DATA / "text.txt").read_bytes().decode("utf-8")


@dataclass(frozen=True)
class Agreement:
    """How near one engine's teacher-forced logprobs are to the stored ones."""

    argmax_equal: float
    """Share of steps with the same most likely id."""
    median: float
    """Of |difference| of logprobs, over the stored top 5 above -6."""
    percentile_99: float


def agreement(cases: list[dict[str, Any]], logits: Any) -> Agreement:
    """Compare `logits(ids) -> (n, vocab)` with every step of every case."""
    equal: list[bool] = []
    differences: list[float] = []
    for case in cases:
        prompt, tokens = case["prompt_tokens"], case["tokens"]
        rows: npt.NDArray[np.float64] = np.asarray(logits(prompt + tokens), np.float64)[len(prompt) - 1 : -1]
        rows = rows - rows.max(axis=1, keepdims=True)
        rows = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        for row, top5 in zip(rows, case["top5"], strict=True):
            equal.append(int(row.argmax()) == top5[0][0])
            differences += [abs(float(row[i]) - logprob) for i, logprob in top5 if logprob > -6]
    return Agreement(float(np.mean(equal)), float(np.median(differences)), float(np.percentile(differences, 99)))
