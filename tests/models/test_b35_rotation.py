"""B35: which dims of q and k rotate together goes by architecture; a wrong choice shows only some way into a text."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from edgellm.backends import create
from edgellm.llm import LLM
from edgellm.loader import open_gguf
from edgellm.models.registry import load_model, model_class
from edgellm.models.tensors import Tensors
from tests.support.goldens import DATA, Golden
from tests.support.models import Runner, make_batch
from tests.support.real import real_model

BOUNDS = {"1": (0.5, 1.2), "64": (0.15, 0.7), "256": (0.15, 0.7)}
"""Median and largest |difference| of logprobs per position: llama.cpp's rounding to 8 bits is loudest after two tokens,
where gemma's float32 logits differ by 0.26 (median) already."""


def check_pairing(name: str, adjacent: bool) -> None:
    golden, backend = Golden(name, DATA / "goldens"), create("reference")
    gguf = open_gguf(golden.path())
    model = load_model(gguf, backend)
    spec = model.blk[0].attn.rope
    assert spec.adjacent is adjacent

    x = np.random.default_rng(0).standard_normal((2, 4, model.config.k_dim)).astype(np.float32)
    turned = backend.rope(x, make_batch([[0], [0]], [0, 5], []), spec)
    assert np.array_equal(turned[0], x[0]) and np.abs(turned[1] - x[1]).max() > 0.1

    local = model.config.rope_local
    wrong = replace(
        model.config,
        rope=replace(model.config.rope, adjacent=not adjacent),
        rope_local=replace(local, adjacent=not adjacent) if local else None,
    )
    swapped = model_class(wrong.arch)(wrong, Tensors(gguf.tensors, backend))
    right, off = Runner(model, backend).logits(golden.ids(2)), Runner(swapped, backend).logits(golden.ids(2))
    assert np.abs(right - golden.logits(2)).max() < 5e-4
    assert np.abs(off[0] - golden.logits(2)[0]).max() < 5e-4  # one token alone tells nothing
    assert np.abs(off[20:] - golden.logits(2)[20:]).max() > 1


def test_b35_llama_rotates_adjacent_pairs() -> None:
    check_pairing("llama", True)


def test_b35_gemma_rotates_halves() -> None:
    check_pairing("gemma3", False)


def check_depth(name: str) -> None:
    """Against llama.cpp with a float32 cache."""
    stored = json.loads((DATA / "real" / "b35.json").read_text())[name]
    with LLM(real_model(name), ctx=512, kv_type="f32") as llm:
        logits = llm.logits(stored["ids"]).astype(np.float64)
        prompt, answer = stored["ids"][:32], stored["greedy"]
        steps = llm.logits(prompt + answer)[len(prompt) - 1 : -1]
    for position, top in stored["top"].items():
        row = logits[int(position)]
        row = row - row.max() - np.log(np.exp(row - row.max()).sum())
        differences = [abs(row[token] - logprob) for token, logprob in top if logprob > -6]
        typical, worst = BOUNDS[position]
        assert np.median(differences) <= typical and max(differences) <= worst, f"position {position}"
    assert len(answer) >= 100 and (steps.argmax(axis=1) == answer).mean() >= 0.95


@pytest.mark.real
def test_b35_smollm_deep_in_a_text() -> None:
    check_depth("smollm2.gguf")


@pytest.mark.real
def test_b35_gemma_deep_in_a_text() -> None:
    check_depth("gemma3-270m.gguf")
