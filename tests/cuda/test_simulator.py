"""How blocks run in the simulator (backends/cuda/simulator.py): NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/cuda."""

from __future__ import annotations

import os

import numpy as np
import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") in ("", "0"):
    pytest.skip("the simulator is off: set NUMBA_ENABLE_CUDASIM=1 before Python starts", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install 'edgellm[cuda]')")

from numba import cuda, types

from edgellm.backends.cuda import device


@cuda.jit
def reverse_twice(x, y):
    mine = cuda.shared.array(256, types.int32)
    me = cuda.threadIdx.x
    for again in range(2):
        mine[me] = y[me] if again else x[me]
        cuda.syncthreads()
        y[me] = mine[cuda.blockDim.x - 1 - me]
        cuda.syncthreads()


@cuda.jit
def fails_in_one_thread(x):
    if cuda.threadIdx.x == 7:
        raise ValueError("thread 7")
    cuda.syncthreads()
    x[cuda.threadIdx.x] = 1


@cuda.jit
def some_leave_early(x):
    if cuda.threadIdx.x >= 40:
        return
    cuda.syncthreads()
    x[cuda.threadIdx.x] = 1


@cuda.jit
def sums(x, y):
    total = device.warp_sum(x[cuda.threadIdx.x])
    y[cuda.threadIdx.x] = total


def test_shared_memory_and_barriers() -> None:
    x, y = np.arange(256, dtype=np.int32), np.zeros(256, np.int32)
    reverse_twice[1, 256](x, y)
    assert (y == x).all()


def test_an_error_in_one_thread_ends_the_launch() -> None:
    x = np.zeros(64, np.int32)
    with pytest.raises(ValueError, match="thread 7"):
        fails_in_one_thread[1, 64](x)
    assert not x.any(), "a thread passed a barrier that another never reached"


def test_threads_that_ended_are_not_waited_for() -> None:
    x = np.zeros(64, np.int32)
    some_leave_early[1, 64](x)
    assert x.tolist() == [1] * 40 + [0] * 24


def test_warps_sum_their_own_lanes() -> None:
    x, y = np.arange(96, dtype=np.float32), np.zeros(96, np.float32)
    sums[1, 96](x, y)
    assert y.tolist() == [496.0] * 32 + [1520.0] * 32 + [2544.0] * 32
