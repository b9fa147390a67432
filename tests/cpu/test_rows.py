"""One recording for many batches: numbers that follow the rows, and bits that do not depend on what ran before."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgellm.backends.base import KVSpec
from edgellm.backends.cpu.backend import CPUBackend
from edgellm.backends.cpu.jit import jit_disabled
from edgellm.backends.cpu.rows import OUTPUTS, TOKENS, Growing, Rows, pieces, room
from edgellm.backends.cpu.tape import COUNTER
from edgellm.config import BLOCK_SIZE
from edgellm.loader import open_gguf
from edgellm.models.registry import load_model
from tests.cpu.support import Cache
from tests.support.tiny import tiny_gguf

SIZES = [{0: 9}, {0: 3, 1: 8}, {0: 1, 1: 1, 2: 1}, {2: 31}, {0: 1, 2: 14}, {1: 40}, {0: 1, 1: 2, 2: 5}, {0: 10, 1: 1}]
"""Rows by sequence of one step after another."""


def test_numbers_made_from_rows_are_those_of_any_other_count():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        largest, n = rng.randint(1, 600), rng.randint(1, 600)
        a, b, length = rng.randint(1, 40), rng.randint(1, 40), rng.randint(1, 2000)
        made, expected = (pieces(b * (x * a * b // a), length) for x in (Rows(largest, TOKENS), n))
        assert type(made) is Rows and type(expected) is int
        assert made.of((n, 0)) == expected and made == -(-largest * b * b // length)


def test_what_cannot_follow_the_rows_is_a_plain_number():
    rows = Rows(10, OUTPUTS, 3)
    for value in (rows // 2, pieces(rows, 7) * 7, rows + 1, rows * Rows(2, TOKENS), -rows):
        assert type(value) is int
    assert [rows // 2, pieces(rows, 7), rows + 1, rows * 2] == [5, 2, 11, 20]


def test_growing_writes_only_places_that_follow_the_rows():
    target = np.full(6, -1, np.int64)
    places = [(0, 7), (1, Rows(8, TOKENS, 5)), (3, Rows(4, OUTPUTS)), (5, pieces(Rows(8, TOKENS, 5), 16))]
    Growing(target, places).set(np.array([7, 2]))
    assert target.tolist() == [-1, 35, -1, 2, -1, 3]
    Growing(target, [(2, 1)]).set(np.array([7, 2]))  # none that does
    assert target.tolist() == [-1, 35, -1, 2, -1, 3]


def test_room_rises_by_four():
    assert [room(n, 8) for n in (0, 8, 9, 32, 33, 129)] == [8, 8, 32, 32, 128, 512]


def results(path: Any, fresh: bool) -> tuple[list[np.ndarray], list[bytes], int]:
    """Logits of the steps of SIZES, what the cache holds afterwards, and how many recordings one backend made.
    `fresh`: a backend of its own for every step."""
    with open_gguf(path) as gguf:
        backend = CPUBackend(threads=2)
        config = load_model(gguf, backend).config
        cache, rng = Cache(np.random.default_rng(3), 3, 256), np.random.default_rng(4)
        specs = [KVSpec(config.n_kv_heads, config.k_dim, config.v_dim, "f16", BLOCK_SIZE, 0) for _ in range(2)]
        kv = [backend.new_kv(spec, cache.n_blocks) for spec in specs]
        found, recordings = list[np.ndarray](), set[int]()
        model = load_model(gguf, backend)

        def forward(b: Any) -> Any:
            return model.forward(b, kv)

        for rows in SIZES:
            if fresh:
                backend.close()  # forgets all recordings
            batch = cache.batch(rows)
            batch.ids[:] = rng.integers(0, config.vocab_size, batch.n_tokens)
            found.append(backend.execute(forward, batch))
            recordings |= set(map(id, backend._tapes.values()))
        backend.close()
        return found, [pages.read_block(i) for pages in kv for i in range(cache.n_blocks)], len(recordings)


@pytest.mark.skipif(jit_disabled(), reason="plain Python is slow")
@pytest.mark.parametrize("arch", ["llama", "qwen2moe"])
def test_a_recording_serves_steps_of_other_sizes(tmp_path, arch):
    path = tiny_gguf(tmp_path / "tiny.gguf", arch, quant="Q8_0")
    (shared, cache, few), (alone, own_cache, _) = results(path, fresh=False), results(path, fresh=True)
    assert few < len(SIZES)
    for a, b in zip(shared, alone, strict=True):
        assert a.shape == b.shape and (a == b).all()
    assert cache == own_cache  # rows that a smaller step does not have are written nowhere


@pytest.mark.skipif(jit_disabled(), reason="plain Python is slow")
def test_a_batch_without_output_rows_ends_with_its_last_store(tmp_path):
    with open_gguf(tiny_gguf(tmp_path / "tiny.gguf", "llama", quant="Q8_0")) as gguf:
        backend = CPUBackend(threads=2)
        model = load_model(gguf, backend)
        spec = KVSpec(model.config.n_kv_heads, model.config.k_dim, model.config.v_dim, "f16", BLOCK_SIZE, 0)
        cache = Cache(np.random.default_rng(3), 1, 64)
        kv = [backend.new_kv(spec, cache.n_blocks) for _ in range(2)]
        batch = cache.batch({0: 40})
        batch.ids[:] = np.arange(40) + 3
        found = []
        for outputs in ([39], [], [39]):
            for pages in kv:
                pages.blocks[:] = 0
            logits = backend.execute(lambda b: model.forward(b, kv), replace(batch, output_rows=np.int32(outputs)))
            [tape] = backend._tapes.values()  # one recording for both
            assert (tape.n_ops < len(tape.rows)) == (not outputs)
            assert not tape.rows[tape.n_ops :, COUNTER].any(), "of no generation: nothing there can be claimed"
            found.append((logits, b"".join(pages.read_block(i) for pages in kv for i in range(cache.n_blocks))))
        assert found[1][0].shape == (0, model.config.vocab_size)
        assert found[0][1] == found[1][1] == found[2][1] and any(found[0][1])
        np.testing.assert_array_equal(found[0][0], found[2][0])
        backend.close()
