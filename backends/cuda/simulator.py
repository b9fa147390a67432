"""numba-cuda's simulator with the threads of a block as coroutines, each run to its next barrier in turn.

The simulator starts a Python thread for every CUDA thread and lets them race: two of them may each make "the" shared
array of a line (`FakeCUDAShared.array` looks it up and stores it without a lock), so that sums come out wrong on a busy
machine. As coroutines they give the same results every time and cost a twentieth. A race between kernel threads that a
GPU would show is not what the simulator finds, then or now."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet
from numba.cuda.simulator import kernel, kernelapi

__all__ = ["install"]


class Lane(greenlet):
    """One CUDA thread: what the simulated `cuda` module asks of the thread that calls it."""

    def __init__(self, manager: BlockManager, block: kernelapi.Dim3, point: tuple[int, ...]):
        super().__init__(manager._f)
        self.blockIdx, self.threadIdx, self._manager = block, kernelapi.Dim3(*point), manager
        x, y = (*manager._block_dim, 1)[:2]
        self.thread_id = point[0] + x * (point[1] + y * point[2])

    def syncthreads(self) -> None:
        """Return once every thread of the block that still runs has called it."""
        self.parent.switch()

    syncthreads_count = kernel.BlockThread.syncthreads_count
    syncthreads_and = kernel.BlockThread.syncthreads_and
    syncthreads_or = kernel.BlockThread.syncthreads_or


class BlockManager(kernel.BlockManager):
    """Runs a block in rounds from barrier to barrier."""

    def run(self, grid_point: tuple[int, ...], *args: Any) -> None:
        """Run all threads of the block at `grid_point`; raises what one of them raised, and then runs none further."""
        block = kernelapi.Dim3(*grid_point)
        lanes = [Lane(self, block, point) for point in np.ndindex(*self._block_dim)]
        for lane in lanes:
            lane.switch(*args)
        while lanes := [lane for lane in lanes if not lane.dead]:
            for lane in lanes:
                lane.switch()


def _shared_array(shared: Any, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
    """`FakeCUDAShared.array`, which reads the source file of every caller on the stack to find the caller's line."""
    if shape == 0:
        return _simulators_own(shared, shape, dtype, alignment)
    frame = sys._getframe(1)
    place = frame.f_code, frame.f_lineno
    if place not in shared._allocations:
        shared._allocations[place] = np.empty(shape, kernelapi.numpy_support.as_dtype(dtype))
    return shared._allocations[place]


_simulators_own = kernelapi.FakeCUDAShared.array


def install() -> None:
    """Make the simulator run blocks this way, in this process."""
    kernel.BlockManager = BlockManager
    kernelapi.threading = SimpleNamespace(current_thread=getcurrent)
    kernelapi.FakeCUDAShared.array = _shared_array
