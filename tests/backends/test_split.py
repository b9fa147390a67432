"""A model on two backends: the first layers on the CPU kernels, the rest on the reference, against the goldens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import LLM, SamplingParams
from edgellm.backends.cpu.backend import CPUBackend
from edgellm.backends.reference import ReferenceBackend
from edgellm.backends.split import ModelBytes, SplitBackend, layers_outside
from edgellm.loader import open_gguf
from edgellm.memory import kv_bytes_per_token, scratch_bytes
from edgellm.models.registry import config_from_metadata, load_model
from tests.support.goldens import DATA, Golden
from tests.support.models import Runner

GOLDENS = DATA / "goldens"


class Card(ReferenceBackend):
    """The reference backend as a device with little memory of its own."""

    name = "card"
    free = 0

    def free_bytes(self) -> int:
        return self.free

    def array(self, values: np.ndarray) -> np.ndarray:
        return values

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "device": "a small card"}


def test_what_stays_outside() -> None:
    need = ModelBytes(layers=(10, 10, 10, 10), embedding=7, head=5, scratch=3, tied=False)
    assert [layers_outside(need, free) for free in (55, 54, 48, 47, 38, 37, 18, 17, 0)] == [0, 0, 0, 1, 1, 2, 3, 4, 4]
    tied = ModelBytes(layers=(10, 10), embedding=7, head=7, scratch=3, tied=True)
    assert [layers_outside(tied, free) for free in (30, 29)] == [0, 1]


# Sinks and experts; a layer norm; an encoder; windows and a tied head; shared experts; norms after.
@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss",
        "command-r",
        "bert",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("gemma3", "qwen2moe", "olmo2")),
    ],
)
def test_goldens(name: str) -> None:
    golden = Golden(name, GOLDENS)
    backend = SplitBackend(CPUBackend(threads=1), Card(), outside=1, total=2)
    try:
        with open_gguf(golden.path()) as gguf:
            model = load_model(gguf, backend)
            run = Runner(model, backend, "f32", n_ctx=256)
            if name == "bert":
                return check_encoder(golden, run)
            for i in range(2):
                assert np.abs(run.logits(golden.ids(i)) - golden.logits(i)).max() < 2e-3
            assert run.greedy(golden.prompt, 6) == golden.greedy[:6]  # single steps: the first part is replayed
    finally:
        backend.close()


def check_encoder(golden: Golden, run: Runner) -> None:
    model, backend = run.model, run.backend
    run.model = type("Hidden", (), {"forward": staticmethod(model.hidden)})
    whole = Runner(load_model(open_gguf(golden.path()), reference := ReferenceBackend()), reference, "f32", n_ctx=256)
    whole.model = type("Hidden", (), {"forward": staticmethod(whole.model.hidden)})
    assert backend.describe()["layers_outside"] == 1
    assert np.abs(run.logits(golden.ids(0), 0) - whole.logits(golden.ids(0), 0)).max() < 1e-4


def test_a_model_too_big_for_its_device_is_split_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Through `LLM`: placement by size, the prefix cache's blocks, words in the log and in stats."""
    from edgellm import opening

    golden, real = Golden("llama", GOLDENS), opening.create
    with open_gguf(golden.path()) as gguf:
        config = config_from_metadata(gguf.metadata)
        layer = sum(t.data.nbytes for name, t in gguf.tensors.items() if name.startswith("blk.1."))
        head = gguf.tensors["output.weight"].data.nbytes
    kv = 64 * 64 * kv_bytes_per_token(config, "f32") // config.n_layers  # a context for each of 64 requests
    monkeypatch.setattr(Card, "free", scratch_bytes(config) + head + layer + kv + (1 << 14))
    monkeypatch.setattr(opening, "create", lambda name, *a: Card() if name == "cuda" else real(name, *a))
    with LLM(golden.path(), backend="cuda", kv_type="f32", ctx=64, prompt_cache=tmp_path / "cache") as llm:
        (done,) = llm.generate([golden.prompt], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        assert list(done.ids) == golden.greedy[:6]
        facts = llm.stats()["backend"]
    assert facts["layers_outside"] == 1 and facts["layers"] == 2
    assert "1 of 2 layers and the output head on a small card" in facts["split"]
    assert facts["split"] in caplog.text
