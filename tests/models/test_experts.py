"""A mixture's decode touches the chosen experts' bytes and no others: the rest of the tensor is made unreadable.

Reading a protected page kills the process, so each case runs in one of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys

import numpy as np
import pytest

from edgellm.backends import create
from edgellm.backends.base import QTensor, RouteSpec
from edgellm.quants import QUANT_TABLE, GGMLType
from tests.support.models import make_batch

N_EXPERTS, N_USED, ROWS, COLUMNS = 8, 2, 256, 1024
CHOSEN = (5, 2)
TYPES = [GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_K]


def experts(type: GGMLType, seed: int = 0) -> tuple[QTensor, mmap.mmap, int]:
    """Random weights; also their memory and the bytes of one expert."""
    row_bytes = COLUMNS // QUANT_TABLE[type].block_size * QUANT_TABLE[type].type_size
    size = ROWS * row_bytes
    memory = mmap.mmap(-1, N_EXPERTS * size)
    data = np.frombuffer(memory, np.uint8).reshape(N_EXPERTS, ROWS, row_bytes)
    # Bytes below 48 are harmless as scales of every type (no infinities).
    data[:] = np.random.default_rng(seed).integers(0, 48, data.shape, np.uint8)
    return QTensor("experts", type, (N_EXPERTS, ROWS, COLUMNS), data), memory, size


def protect(memory: mmap.mmap, start: int, size: int) -> None:
    """No access any more to the whole pages among these bytes."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    address, size = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + first, last - first
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(address, size, 0):
        raise OSError(ctypes.get_errno(), "mprotect")


def products(backend_name: str, type: GGMLType, protected: tuple[int, ...]) -> np.ndarray:
    """One token's products with its chosen experts, (1, N_USED, ROWS); some experts are out of reach."""
    backend = create(backend_name)
    tensor, memory, size = experts(type)
    weight = backend.load(tensor)
    for expert in protected:
        protect(memory, expert * size, size)
    scores = np.zeros((1, N_EXPERTS), np.float32)
    scores[0, list(CHOSEN)] = (3, 2)
    x = np.random.default_rng(1).standard_normal((1, COLUMNS)).astype(np.float32)
    table, router = ((backend.load(f32(name, values))) for name, values in (("x", x), ("s", scores)))

    def forward(batch):  # type: ignore[no-untyped-def]
        ids, _ = backend.route(backend.embed(router, batch.ids), RouteSpec(N_USED))
        out = backend.expert_linear(backend.embed(table, batch.ids), weight, ids)
        return out.reshape(1, N_USED * ROWS)

    return backend.execute(forward, make_batch([[0]], [0], []))


def f32(name: str, values: np.ndarray) -> QTensor:
    return QTensor(name, GGMLType.F32, values.shape, values.view(np.uint8))


def run(backend: str, type: GGMLType, protected: tuple[int, ...]) -> subprocess.CompletedProcess[bytes]:
    code = (
        "import sys; from tests.models.test_experts import *; "
        f"sys.stdout.buffer.write(products({backend!r}, GGMLType.{type.name}, {protected!r}).tobytes())"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)


@pytest.mark.parametrize("backend,type", [("reference", GGMLType.F16), *(("cpu", type) for type in TYPES)])
def test_experts_that_were_not_chosen_are_never_read(backend: str, type: GGMLType) -> None:
    others = tuple(e for e in range(N_EXPERTS) if e not in CHOSEN)
    done = run(backend, type, others)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    found = np.frombuffer(done.stdout, np.float32)
    assert found.size == N_USED * ROWS and np.abs(found).max() > 0
    assert np.array_equal(found, products(backend, type, ()).ravel())


def test_the_guard_sees_a_read() -> None:
    assert run("reference", GGMLType.F16, (CHOSEN[0],)).returncode < 0
