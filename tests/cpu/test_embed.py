"""Embedding rows are what `dequantise` gives, bit for bit: every type, short and long rows, one token and many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgellm.backends.base import Batch
from edgellm.backends.cpu.arena import Buf
from edgellm.backends.cpu.backend import CPUBackend
from edgellm.backends.cpu.embed import KERNELS
from edgellm.backends.cpu.tape import BARRIER, N_FOLLOWERS
from edgellm.backends.dequant import dequantise
from edgellm.quants import QUANT_TABLE, GGMLType, QTensor
from tests.cpu.support import Cache, tensor
from tests.cpu.test_matmul import weight

pytestmark = pytest.mark.kernel
SEED = 23
VOCAB = 9


@pytest.fixture(scope="module")
def cpu():
    backend = CPUBackend(threads=2)
    yield backend
    backend.close()


def batch_of(ids: list[int]) -> Batch:
    batch = Cache(np.random.default_rng(SEED), 1, len(ids)).batch({0: len(ids)})
    return replace(batch, ids=np.array(ids, np.int32))


def table_of(kind: str, blocks: int) -> QTensor:
    """Random rows; float types have an odd length."""
    rng = np.random.default_rng([SEED, blocks])
    if kind in ("F32", "F16", "BF16"):
        return tensor(rng.standard_normal((VOCAB, 8 * blocks + 3)).astype(np.float32), GGMLType[kind])
    return weight(rng, kind, VOCAB, blocks * QUANT_TABLE[GGMLType[kind]].block_size)


@pytest.mark.parametrize("kind", [*KERNELS, "TQ2_0"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_rows_are_what_dequantise_gives(cpu: CPUBackend, kind: str, blocks: int) -> None:
    table = table_of(kind, blocks)
    loaded, rng = cpu.load(table), np.random.default_rng(SEED)

    def forward(b: Batch) -> Buf:
        return cpu.embed(loaded, b.ids)

    for n in (1, 3, 40, 37, 2):  # the recording for 40 rows serves 37 as well
        ids = [VOCAB - 1, *rng.integers(0, VOCAB, n - 1).tolist()]
        with np.errstate(invalid="ignore"):  # random scales of TQ2_0, which has no kernel
            given, expected = cpu.execute(forward, batch_of(ids)), dequantise(table.data[ids], table.type)
        assert given.view(np.uint32).tolist() == expected.view(np.uint32).tolist(), (kind, n)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_scales_of_all_sizes(cpu: CPUBackend, kind: str) -> None:
    """Blocks of random bits: huge and subnormal scales, both signs of zero."""
    info = QUANT_TABLE[GGMLType[kind]]
    data = np.random.default_rng(SEED).integers(0, 256, (64, 2 * info.type_size), dtype=np.uint8)
    data[:2] = 0
    data[2, :2] = data[2, info.type_size - 2 : info.type_size] = 0, 128
    table = QTensor("test.weight", GGMLType[kind], (64, 2 * info.block_size), data)
    loaded, ids = cpu.load(table), list(range(64))
    given = cpu.execute(lambda b: cpu.embed(loaded, b.ids), batch_of(ids))
    with np.errstate(invalid="ignore", over="ignore"):
        expected = dequantise(data, table.type)
    same = (given.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(given) & np.isnan(expected))
    assert same.all()


def test_norm_and_activations_follow_the_lookup(cpu: CPUBackend) -> None:
    """Lookup, norm and quantised rows are one op and two followers; only the product waits for all of them."""
    table, rng = cpu.load(table_of("Q8_0", 1)), np.random.default_rng(SEED)
    matrix = cpu.load(weight(rng, "Q4_0", 5, 32))

    def forward(b: Batch) -> Buf:
        return cpu.linear(cpu.rms_norm(cpu.embed(table, b.ids), None, 1e-5), matrix)

    batch = batch_of([3, 1, 4])
    together = cpu.execute(forward, batch)
    assert cpu._tape_for(forward, batch).rows[:, [BARRIER, N_FOLLOWERS]].tolist() == [[0, 2], [1, 0]]
    assert together.tolist() == [cpu.execute(forward, batch_of([i]))[0].tolist() for i in (3, 1, 4)]


def test_ids_and_positions_are_read_at_each_run(cpu: CPUBackend) -> None:
    words, places = table_of("Q4_1", 2), table_of("Q8_0", 2)
    loaded = cpu.load(words), cpu.load(places)

    def forward(b: Batch) -> Buf:
        return cpu.add(cpu.embed(loaded[0], b.ids), cpu.embed(loaded[1], b.positions))

    for ids, positions in (([3, 1, 4], [0, 1, 2]), ([8, 0, 3], [5, 8, 0]), ([7], [6])):
        given = cpu.execute(forward, replace(batch_of(ids), positions=np.array(positions, np.int32)))
        expected = dequantise(words.data[ids], words.type) + dequantise(places.data[positions], places.type)
        assert given.tolist() == expected.tolist()
