"""Shares of the memory budget, with real engines over tiny files whose caches are large. All sizes in bytes."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.memory import runtime_bytes
from edgellm.server.catalog import ModelRecord
from edgellm.server.loading import Loader
from edgellm.server.settings import ServerSettings
from tests.support.tiny import tiny_gguf

CTX = 16384
KV = CTX * 16384
"""One context: 4 layers of K and V, 16 heads of 64, two bytes each."""
BESIDE = 128 << 20
"""Room for scratch, and for what the process grows by between two looks."""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> ModelRecord:
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    tiny_gguf(path, n_layers=4, n_heads=16, n_kv_heads=16, head_dim=64, context_length=CTX)
    return ModelRecord("m", path, "0" * 64, path.stat().st_size, 0.0)


def test_a_draft_that_half_the_room_does_not_hold_gets_all_of_it(record: ModelRecord) -> None:
    budget = 2 * (runtime_bytes() + KV + BESIDE)
    settings = ServerSettings(backend="reference", memory=budget, draft=str(record.path))
    llm, reserved = Loader(settings, budget)(record, budget)
    with llm:
        assert (llm.ctx, reserved) == (CTX, budget)


def test_what_a_loaded_model_came_to_hold_is_not_counted_again(record: ModelRecord) -> None:
    share = runtime_bytes() + KV + BESIDE
    loader = Loader(ServerSettings(backend="reference", memory=3 * share), 3 * share)
    first, reserved = loader(record, 3 * share)
    with first:
        cache = np.ones(KV + BESIDE, np.uint8)  # as the first model's rows, once they are written
        second, other = loader(record, share)
        with second:
            assert (second.ctx, other) == (CTX, share) and reserved == 3 * share // 2
        del cache
