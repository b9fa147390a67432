"""Paged attention: against the reference, and bit-equal however the same rows are computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgellm.backends.base import AttentionSpec
from edgellm.backends.cpu.backend import CPUBackend
from edgellm.backends.cpu.jit import jit_disabled
from edgellm.backends.reference import ReferenceBackend
from tests.cpu.support import Cache, constant, kv_spec, tensor

SEED = 5
TOLERANCE = {"f32": 2e-5, "f16": 2e-5, "q8_0": 2e-5}
"""Both backends store the same rounded K and V; what differs is the order of float32 sums."""


@pytest.fixture(scope="module")
def cpu():
    backend = CPUBackend(threads=2)
    yield backend
    backend.close()


class Case:
    """Random q, k, v of a few sequences, computable in any split into steps."""

    def __init__(self, n_seqs=2, length=300, heads=4, kv_heads=2, k_dim=16, v_dim=None, kv_type="f32", **spec):
        rng = np.random.default_rng(SEED)
        self.kv = kv_spec(kv_type, kv_heads, k_dim, v_dim)
        self.spec = AttentionSpec(scale=k_dim**-0.5, **spec)
        self.n_seqs, self.length, self.heads = n_seqs, length, heads
        self.q = rng.standard_normal((n_seqs, length, heads, k_dim), np.float32)
        self.k = rng.standard_normal((n_seqs, length, kv_heads, k_dim), np.float32)
        self.v = rng.standard_normal((n_seqs, length, kv_heads, self.kv.v_dim), np.float32)

    def run(self, backend, steps, sinks=None):
        """Outputs (n_seqs, length, heads, v_dim) of the rows that `steps` (dicts sequence -> rows) compute."""
        cache = Cache(np.random.default_rng(SEED), self.n_seqs, self.length + 64)
        pages = backend.new_kv(self.kv, cache.n_blocks)
        tables = [constant(backend, x.reshape(-1, *x.shape[2:])) for x in (self.q, self.k, self.v)]
        spec = self.spec if sinks is None else replace(self.spec, sinks=backend.load(tensor(sinks)))
        kv_heads, v_dim = self.kv.n_kv_heads, self.kv.v_dim
        out = np.full((self.n_seqs, self.length, self.heads, v_dim), np.nan, np.float32)

        def forward(b):
            q, k, v = (backend.embed(t, b.ids) for t in tables)
            n = len(b.ids)
            backend.store_kv(pages, k.reshape(n, kv_heads, -1), v.reshape(n, kv_heads, -1), b)
            return backend.attention(q.reshape(n, self.heads, -1), pages, b, spec)

        for rows in steps:
            before = cache.lengths.copy()
            batch = cache.batch(rows)
            ids = np.concatenate([s * self.length + before[s] + np.arange(n) for s, n in rows.items()])
            result = backend.execute(forward, replace(batch, ids=ids.astype(np.int32)))
            for i, (s, n) in enumerate(rows.items()):
                part = result[batch.seq_starts[i] : batch.seq_starts[i + 1]]
                out[s, before[s] : before[s] + n] = part.reshape(n, self.heads, v_dim)
        return out


# Three shapes of kernels (they take seconds to compile); masks and caps are arguments of the same kernels.
LLAMA = {"heads": 9, "kv_heads": 3, "k_dim": 64}
WIDE = {"heads": 5, "kv_heads": 1, "k_dim": 80, "v_dim": 40, "kv_type": "f16"}
ODD = {"heads": 2, "kv_heads": 2, "k_dim": 21, "v_dim": 19, "kv_type": "q8_0"}
CASES = [
    LLAMA,
    dict(LLAMA, window=70, softcap=5.0),
    dict(LLAMA, causal=False),
    dict(LLAMA, causal=False, window=70),
    dict(WIDE, window=270),
    dict(WIDE, softcap=5.0),
    ODD,
]


@pytest.mark.kernel
@pytest.mark.parametrize("case", CASES if not jit_disabled() else [dict(c, length=40, window=20) for c in CASES[:1]])
def test_against_reference(cpu, case):
    made = Case(**case)
    whole = [dict.fromkeys(range(made.n_seqs), made.length)]
    expected = made.run(ReferenceBackend(), whole)
    np.testing.assert_allclose(made.run(cpu, whole), expected, atol=TOLERANCE[made.kv.kv_type], rtol=2e-5)


def test_sinks(cpu):
    made = Case(**LLAMA, window=64)
    sinks = np.linspace(-1, 40, 9, dtype=np.float32)
    steps = [{0: 200, 1: 300}, {0: 100}]
    expected = made.run(ReferenceBackend(), steps, sinks)
    np.testing.assert_allclose(made.run(cpu, steps, sinks), expected, atol=2e-5, rtol=2e-5)


def splits(length, n_seqs):
    """The same rows as one prompt, in chunks, row by row, in drafts of five, alone and side by side."""
    everyone = range(n_seqs)
    yield [dict.fromkeys(everyone, length)]
    yield [{s: length} for s in everyone]
    yield [{s: n for s in everyone} for n in (100, 1, 33, 5, length - 139)]
    last = [{s: 1 for s in everyone}] * 12
    yield [dict.fromkeys(everyone, length - 12), *last]
    yield [{s: length - 15} for s in everyone] + [{0: 5, 1: 2}, {0: 5, 1: 8}, {0: 5, 1: 5}]


@pytest.mark.parametrize("case", [LLAMA, dict(LLAMA, window=70, softcap=5.0), dict(WIDE, window=270), ODD])
def test_bits_do_not_depend_on_the_split(case):
    made = Case(**dict(case, length=600))
    results = []
    for threads in (1, 3):
        backend = CPUBackend(threads=threads)
        results += [made.run(backend, steps) for steps in splits(made.length, made.n_seqs)]
        backend.close()
    for other in results[1:]:
        assert (results[0] == other).all()


def test_stale_nan_in_a_block_is_not_read(cpu):
    """A block that held another sequence's broken rows does not spoil its next owner."""
    made = Case(**LLAMA, n_seqs=1, length=40)
    cache = Cache(np.random.default_rng(SEED), 1, 104)
    pages = cpu.new_kv(made.kv, cache.n_blocks)
    spoiled = np.full(pages.layout.block, 255, np.uint8).tobytes()
    for block in cache.table[0]:
        pages.write_block(int(block), spoiled)
    original, cpu.new_kv = cpu.new_kv, lambda *_: pages
    try:
        out = made.run(cpu, [{0: 33}, {0: 7}])
    finally:
        cpu.new_kv = original
    assert np.isfinite(out).all()


def test_blocks_can_be_saved_and_copied(cpu):
    pages = cpu.new_kv(kv_spec("f16", 2, 16), 4)
    data = np.random.default_rng(0).integers(0, 256, pages.layout.block, np.uint8).tobytes()
    pages.write_block(2, data)
    pages.copy_block(2, 3)
    assert pages.read_block(3) == data
    with pytest.raises(ValueError, match="bytes"):
        pages.write_block(1, data[:-1])
