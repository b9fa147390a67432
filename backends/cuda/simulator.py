"""numba-cuda's simulator with one thread of a block running at a time, in the order of their numbers.

The simulator starts a Python thread for every CUDA thread and lets them race: two of them may each make "the" shared
array of a line (`FakeCUDAShared.array` looks it up and stores it without a lock), so that sums come out wrong on a busy
machine, and all of them are polled until they meet at a barrier. Here a thread runs until its next barrier and then
hands on to the next one: the same results every time, for a fifth of the CPU time. A race between kernel threads that a
GPU would show is not what the simulator finds, then or now."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.cuda.simulator import kernel, kernelapi

__all__ = ["install"]


class BlockThread(kernel.BlockThread):
    """One CUDA thread of a block: it runs while it holds its turn."""

    def __init__(self, f: Callable[[], None], manager: BlockManager, block: tuple[int, ...], thread: tuple[int, ...]):
        super().__init__(f, manager, block, thread, False)
        self.turn, self.manager = threading.Semaphore(0), manager

    def run(self) -> None:
        self.turn.acquire()
        if not self.abort:
            super().run()
        self.manager.ended.add(self)
        self.manager.hand_on()

    def syncthreads(self) -> None:
        """Return once every thread of the block that still runs has called it."""
        self.manager.hand_on()
        self.turn.acquire()
        if self.abort:
            raise RuntimeError("another thread of the block failed")


class BlockManager(kernel.BlockManager):
    """Runs a block: rounds from barrier to barrier, each thread once a round."""

    def run(self, grid_point: tuple[int, ...], *args: Any) -> None:
        """Run all threads of the block at `grid_point`; raises what one of them raised."""
        threads = [
            BlockThread(lambda: self._f(*args), self, grid_point, point) for point in np.ndindex(*self._block_dim)
        ]
        self.ended: set[BlockThread] = set()
        self.round_over = threading.Semaphore(0)
        for thread in threads:
            thread.start()
        while alive := [thread for thread in threads if thread not in self.ended]:
            self.waiting = iter(alive)
            self.hand_on()
            self.round_over.acquire()
            failed = next((thread.exception for thread in threads if thread.exception), None)
            if failed:
                for thread in threads:
                    thread.abort = True
                    thread.turn.release()
                raise failed[0].with_traceback(failed[1])

    def hand_on(self) -> None:
        """Give the turn to the next thread of this round, or end the round."""
        following = next(self.waiting, None)
        (following.turn if following else self.round_over).release()


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
    kernelapi.FakeCUDAShared.array = _shared_array
