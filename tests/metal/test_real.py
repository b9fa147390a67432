"""Real models on the Metal backend's plain ops: logits of the reference backend, exact path (f32 cache)."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")

from edgellm import LLM
from tests.support.real import real_cases, real_model

pytestmark = pytest.mark.real

CASES = {"smollm2.gguf": "smollm2-135m-q4_1.json", "gemma3-270m.gguf": "gemma3-270m-q4_k_m.json"}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_references(name: str) -> None:
    case = real_cases(CASES[name])[0]
    ids = (case["prompt_tokens"] + case["tokens"])[:24]
    rows = []
    for backend in ("reference", "metal"):
        with LLM(real_model(name), backend=backend, kv_type="f32", ctx=64) as llm:
            rows.append(llm.logits(ids))
    assert np.abs(rows[0] - rows[1]).max() < 2e-3
    assert (rows[0].argmax(axis=1) == rows[1].argmax(axis=1)).all()
