"""Products and embedding lookups read no byte behind their weights, which may be the last of a mapped file."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edgellm.backends.cpu.jit import jit_disabled

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(jit_disabled(), reason="plain Python reads arrays, not memory")]

AT_THE_END_OF_A_PAGE = """
import ctypes, mmap, sys
import numpy as np
from edgellm.backends.cpu.backend import CPUBackend
from edgellm.backends.cpu.embed import KERNELS
from edgellm.backends.cpu.matmul import QUANTISED
from edgellm.quants import QUANT_TABLE, GGMLType, QTensor
from tests.cpu.test_embed import VOCAB, batch_of, table_of
from tests.cpu.test_matmul import SEED, product, weight

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
cpu, rng = CPUBackend(threads=2), np.random.default_rng(SEED)


def at_the_end(given):  # with its last byte right before memory that cannot be read
    size = -(-given.data.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    assert libc.mprotect(memory.ctypes.data + size, mmap.PAGESIZE, 0) == 0, ctypes.get_errno()
    data = memory[size - given.data.nbytes : size]
    data[:] = given.data.reshape(-1)
    return QTensor("test.weight", given.type, given.shape, data.reshape(given.data.shape))


for kind in sorted(QUANTISED):
    for m, blocks in ((3, 1), (19, 2), (9, 3), (16, 5)):
        k = blocks * QUANT_TABLE[GGMLType[kind]].block_size
        given = weight(rng, kind, m, k)
        last = at_the_end(given)
        for rows in (1, 2, 4, 8, 11):
            x = rng.standard_normal((rows, k)).astype(np.float32)
            print(kind, m, blocks, rows, flush=True)
            assert np.array_equal(product(cpu, x, last), product(cpu, x, given))
for kind in KERNELS:
    for blocks in (1, 3):
        given = table_of(kind, blocks)
        batch, tables = batch_of([0, VOCAB - 1]), [cpu.load(t) for t in (given, at_the_end(given))]
        print("embed", kind, blocks, flush=True)
        one, other = (cpu.execute(lambda b, t=t: cpu.embed(t, b.ids), batch) for t in tables)
        assert np.array_equal(one, other)
print("done")
"""


def test_no_byte_behind_the_weights_is_read() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END_OF_A_PAGE], capture_output=True, text=True, timeout=600)
    assert done.stdout.endswith("done\n"), (done.returncode, done.stdout[-60:], done.stderr[-600:])
