"""On the CPU backend a position's logits are the same bits alone, in chunks, token by token, and beside neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgellm.backends import create
from edgellm.backends.base import Backend
from edgellm.config import BLOCK_SIZE
from edgellm.errors import BackendUnavailable
from edgellm.loader import open_gguf
from edgellm.models.registry import load_model
from tests.support.goldens import DATA, DECODERS, Golden
from tests.support.models import Runner, make_batch, new_kv

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    try:
        made = create("cpu")
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    yield made
    made.close()


def beside(model: Any, backend: Backend, ids: list[int], neighbour: list[int], variant: int) -> np.ndarray:
    """Logits of `ids` as the second of three sequences, the others being `neighbour`."""
    blocks = np.arange(1, 7, dtype=np.int32).reshape(3, 2)
    assert max(len(ids), len(neighbour)) <= 2 * BLOCK_SIZE
    kv = new_kv(model.config, backend, "f32", 7)
    tables = [blocks] * len(model.config.cache_groups)
    batch = make_batch([neighbour, ids, neighbour], [0, 0, 0], tables, None, [variant] * 3)
    rows = backend.execute(lambda b: model.forward(b, kv), batch)
    return rows[len(neighbour) : len(neighbour) + len(ids)]


@pytest.mark.parametrize("name", DECODERS)
def test_same_bits_on_every_path(name: str, backend: Backend) -> None:
    golden = Golden(name, DATA / "goldens")
    model = load_model(open_gguf(golden.path()), backend)
    ids, variant = golden.ids(2), model.config.rope_variant(len(golden.ids(2)))
    run = Runner(model, backend)
    whole = run.logits(ids)
    for cuts in ([7, 8, 29], list(range(1, len(ids)))):
        run.position = 0
        parts = [run.run(part.tolist(), variant=variant) for part in np.split(np.array(ids), cuts)]
        assert np.array_equal(np.concatenate(parts), whole), f"chunks cut at {cuts[:3]}"
    run.position = 0
    assert run.run(ids[:13], rows=[], variant=variant).shape == (0, whole.shape[1])
    assert np.array_equal(run.run(ids[13:], variant=variant), whole[13:])
    assert np.array_equal(beside(model, backend, ids, golden.ids(1), variant), whole)
