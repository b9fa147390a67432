"""A team of threads that run a tape together: each sits in one compiled call, so no Python runs between two ops.

Threads take units of an op from its counter (an atomic add, so slow or disturbed cores simply take fewer) and meet at
spin barriers where the tape asks for one. Between tapes workers spin for about 100 us, then sleep on a semaphore.
State is an int64 array, one cache line (8) per field or thread; the calling thread is member 0.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

import numpy as np

from edgellm.backends.cpu.jit import Library, inline, jit_disabled, kernel
from edgellm.backends.cpu.simd import Op, atomic_add, atomic_load, load_i64, op, pause, store_i64
from edgellm.backends.cpu.tape import ALIGN, ARGS, BARRIER, COUNTER, KERNEL, ROW, STEP, UNITS, Tape

__all__ = ["Team", "default_threads"]

# Byte offsets in the state: a line each, then two lines per thread.
GENERATION, ARRIVED, ROWS, N_OPS, YIELD, THREADS = 0, 64, 128, 136, 144, 192
SEEN, PASSED, SCRATCH, ASLEEP, PER_THREAD = 0, 8, 16, 64, 128
SPIN_BARRIER = 256  # pauses before a waiting thread offers its core to others (about 15 us on x86)
SPIN_IDLE = 2000  # pauses before an idle worker goes to sleep


def _no_twin(*args: int) -> None:
    raise NotImplementedError("with JIT disabled a tape runs through Tape.run_plain")


call_kernel: Op = op("void(i64, i64, i64, i64, i64)", lambda e, f, *args: e.call_address(f, *args))(_no_twin)
call_plain: Op = op("void(i64)", lambda e, f: e.call_address(f))(_no_twin)


@inline
def meet(state: int, own: int, n_threads: int) -> None:
    """Arrive, and wait for all others. The count only ever rises, so nothing has to be reset."""
    passed = load_i64(own + PASSED) + n_threads
    store_i64(own + PASSED, passed)
    atomic_add(state + ARRIVED, 1)
    spins = 0
    while atomic_load(state + ARRIVED) < passed:
        pause()
        spins += 1
        if spins > SPIN_BARRIER:
            call_plain(load_i64(state + YIELD))
            spins = 0


@inline
def run_ops(state: int, own: int, n_threads: int) -> None:
    """One thread's share of the tape."""
    row, scratch = load_i64(state + ROWS), load_i64(own + SCRATCH)
    for _ in range(load_i64(state + N_OPS)):
        if load_i64(row + 8 * BARRIER) != 0:
            meet(state, own, n_threads)
        units, step = load_i64(row + 8 * UNITS), load_i64(row + 8 * STEP)
        function, args = load_i64(row + 8 * KERNEL), load_i64(row + 8 * ARGS)
        begin = atomic_add(row + 8 * COUNTER, step)
        while begin < units:
            call_kernel(function, args, begin, min(begin + step, units), scratch)
            begin = atomic_add(row + 8 * COUNTER, step)
        row += 8 * ROW


@kernel
def team_publish(args: int, begin: int, end: int, scratch: int) -> None:
    """Let the workers see a new tape. args: state."""
    atomic_add(args + GENERATION, 1)


@kernel
def team_lead(args: int, begin: int, end: int, scratch: int) -> None:
    """Member 0's part of one tape. args: state; end: number of threads."""
    run_ops(args, args + THREADS, end)
    meet(args, args + THREADS, end)


@kernel
def team_work(args: int, begin: int, end: int, scratch: int) -> None:
    """Member `begin` of `end`: run tapes as they are published, return after a quiet while with ASLEEP set."""
    own = args + THREADS + begin * PER_THREAD
    seen = load_i64(own + SEEN)
    spins = 0
    while spins < SPIN_IDLE:
        if atomic_load(args + GENERATION) != seen:
            seen += 1
            store_i64(own + SEEN, seen)
            run_ops(args, own, end)
            store_i64(own + PASSED, load_i64(own + PASSED) + end)
            atomic_add(args + ARRIVED, 1)
            spins = 0
        pause()
        spins += 1
        if spins == SPIN_IDLE:
            # Said before the last look, so that a publisher that missed the look sees the flag.
            atomic_add(own + ASLEEP, 1)
            if atomic_load(args + GENERATION) != seen:
                atomic_add(own + ASLEEP, -1)
                spins = 0


KERNELS = (team_publish, team_lead, team_work)


def default_threads() -> int:
    """Physical cores this process may use (performance cores on Apple Silicon): hyper-threads and efficiency cores
    make a memory-bound step slower."""
    import psutil

    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if sys.platform == "darwin":
        physical = _performance_cores() or physical
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed))


def _performance_cores() -> int:
    libc = ctypes.CDLL(None)
    value, size = ctypes.c_int32(0), ctypes.c_size_t(4)
    failed = libc.sysctlbyname(b"hw.perflevel0.physicalcpu", ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


class Team:
    """`n_threads` members; `run` is safe to call from several Python threads (they take turns)."""

    def __init__(self, library: Library, n_threads: int):
        self.n_threads = n_threads
        self._library = library
        self._lock = threading.Lock()
        self._memory = np.zeros(THREADS + n_threads * PER_THREAD + ALIGN, np.uint8)
        start = -self._memory.ctypes.data % ALIGN
        self._state = self._memory[start : start + THREADS + n_threads * PER_THREAD].view(np.int64)
        self._scratch: list[np.ndarray[Any, Any]] = []
        self._wake = [threading.Semaphore(0) for _ in range(n_threads)]
        self._workers: list[threading.Thread] = []
        self._closing = False
        if not jit_disabled():
            library.load(KERNELS)
            self._publish, self._lead, self._work = (library.function(k) for k in KERNELS)
            yield_ = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
            self._state[YIELD // 8] = yield_ or 0

    def run(self, tape: Tape) -> None:
        """Run all ops of a tape whose batch is loaded."""
        with self._lock:
            if jit_disabled():
                tape.run_plain()
                return
            self._reserve(tape.scratch)
            self._start()
            state = self._state
            state[ROWS // 8], state[N_OPS // 8] = tape.rows.ctypes.data, len(tape.rows)
            if self.n_threads > 1:
                self._publish(state.ctypes.data, 0, 0, 0)
                for i in range(1, self.n_threads):
                    if state[(THREADS + i * PER_THREAD + ASLEEP) // 8]:
                        self._wake[i].release()
            self._lead(state.ctypes.data, 0, self.n_threads, 0)

    def close(self) -> None:
        """End the workers. Idempotent; the team starts again when it is used again."""
        with self._lock:
            self._closing = True
            for wake in self._wake:
                wake.release()
            for worker in self._workers:
                worker.join()
            self._workers = []
            self._wake = [threading.Semaphore(0) for _ in range(self.n_threads)]
            self._closing = False

    def _reserve(self, size: int) -> None:
        if self._scratch and len(self._scratch[0]) >= size + ALIGN:
            return
        self._scratch = [np.empty(size + ALIGN, np.uint8) for _ in range(self.n_threads)]
        for i, memory in enumerate(self._scratch):
            self._state[(THREADS + i * PER_THREAD + SCRATCH) // 8] = -(-memory.ctypes.data // ALIGN) * ALIGN

    def _start(self) -> None:
        if self._workers or self.n_threads == 1:
            return
        for i in range(1, self.n_threads):
            worker = threading.Thread(target=self._serve, args=(i,), name=f"edgellm-cpu-{i}", daemon=True)
            self._workers.append(worker)
            worker.start()

    def _serve(self, member: int) -> None:
        wake, asleep = self._wake[member], (THREADS + member * PER_THREAD + ASLEEP) // 8
        while not self._closing:
            self._state[asleep] = 0
            self._work(self._state.ctypes.data, member, self.n_threads, 0)
            wake.acquire()
