"""A team of threads that run a tape together: each sits in one compiled call, so no Python runs between two ops.

Threads claim units of an op from its counter. Where the tape asks for a barrier they wait until the units of the ops
before it are *done*, not until every thread has arrived: a thread that the system has put aside holds the others up
only while it holds a unit, and a slow core simply takes fewer. A thread that has waited for long sleeps between two
looks: to a core without work the system brings a thread that it has put aside elsewhere, which then goes back to its
own (cores.py). Products claim a thread's share of the units that are left: their kernels ask for the next unit's
weights ahead of time, which helps only the thread that takes that unit. Each run has a generation, which stands in
the upper half of every counter, so a thread that wakes up in an older run finds nothing to claim and comes home.

Between tapes workers spin for about 100 us, then sleep on a semaphore. State is an int64 array: a cache line (8) for
the generation, what does not change while a tape runs, then six lines per thread; the caller is member 0.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

import numpy as np

from edgellm.backends.base import Batch
from edgellm.backends.cpu.arena import ALIGN
from edgellm.backends.cpu.cores import STRIDE, addresses_of_calls, follow_core, forget_cores, nanoseconds
from edgellm.backends.cpu.jit import Library, inline, jit_disabled, kernel
from edgellm.backends.cpu.simd import (
    atomic_add,
    atomic_load,
    compare_exchange,
    load_i64,
    pause,
    store_i64,
)
from edgellm.backends.cpu.simd_call import call_kernel, call_plain
from edgellm.backends.cpu.tape import (
    ARGS,
    BARRIER,
    COUNTER,
    DONE,
    FOLLOWER,
    FOLLOWERS,
    KERNEL,
    N_FOLLOWERS,
    ROW,
    STEP,
    UNITS,
    Tape,
)
from edgellm.errors import BackendUnavailable

__all__ = ["Team", "default_threads"]

# Byte offsets in the state, and those within the lines of a thread.
GENERATION, ROWS, N_OPS, YIELD, MEMBERS, SLEEP, SYSTEM, THREADS = 0, 64, 72, 80, 88, 96, 104, 192
SEEN, SCRATCH, ASLEEP, CORE, SYSTEM_SCRATCH, PER_THREAD = 0, 8, 64, 72, 128, STRIDE
SPIN_WAIT = 256  # pauses before a waiting thread offers its core to others (about 15 us on x86)
PATIENCE = 200_000  # nanoseconds of waiting after which it sleeps instead
NAP = 50  # microseconds
SPIN_IDLE = 2000  # pauses before an idle worker goes to sleep
UNIT_MASK = (1 << 32) - 1


@inline
def own_scratch(state: int, member: int) -> int:
    """A member's memory for calls of the system. It lies in the state: what kernels use may be gone for a late one."""
    return state + THREADS + member * PER_THREAD + SYSTEM_SCRATCH


@inline
def spread(state: int, member: int) -> None:
    """Leave a core that a member before this one is on."""
    members = load_i64(state + MEMBERS)
    follow_core(state + SYSTEM, state + THREADS + CORE, members, member, own_scratch(state, member))


@inline
def wait_done(state: int, first: int, last: int, generation: int, member: int) -> int:
    """Wait until the ops of rows first..last are done. 0 if the run turns out to be over."""
    spins = 0
    since = 0
    current = 1
    row = first
    while row < last and current != 0:
        if atomic_load(row + 8 * DONE) >= load_i64(row + 8 * UNITS):
            row += 8 * ROW
        elif atomic_load(row + 8 * COUNTER) >> 32 != generation:
            current = 0
        else:
            pause()
            spins += 1
            if spins > SPIN_WAIT:
                spread(state, member)
                now = nanoseconds(state + SYSTEM, own_scratch(state, member))
                if since == 0:
                    since = now
                if now - since < PATIENCE:
                    call_plain(load_i64(state + YIELD))
                else:
                    call_kernel(load_i64(state + SLEEP), NAP, 0, 0, 0)
                spins = 0
    return current


@inline
def run_ops(state: int, generation: int, scratch: int, member: int) -> None:
    """One thread's share of the tape; member 0 also waits for the end."""
    row = load_i64(state + ROWS)
    last = row + 8 * ROW * load_i64(state + N_OPS)
    group = row
    while row < last:
        if load_i64(row + 8 * BARRIER) != 0:
            if wait_done(state, group, row, generation, member) == 0:
                return
            group = row
        spread(state, member)
        counter = atomic_load(row + 8 * COUNTER)
        while True:
            # The counter is read before the row's other fields: a claim succeeds only if they belonged to it.
            units, step = load_i64(row + 8 * UNITS), load_i64(row + 8 * STEP)
            begin = counter & UNIT_MASK
            if counter >> 32 != generation:
                return
            if begin >= units:
                break
            function, args = load_i64(row + 8 * KERNEL), load_i64(row + 8 * ARGS)
            if step == 0:
                step = max(1, (units - begin) // load_i64(state + MEMBERS))
            end = min(begin + step, units)
            found = compare_exchange(row + 8 * COUNTER, counter, counter + step)
            if found == counter:
                call_kernel(function, args, begin, end, scratch)
                follower = row + 8 * FOLLOWERS
                for _ in range(load_i64(row + 8 * N_FOLLOWERS)):
                    ratio, last_unit = load_i64(follower + 16), load_i64(follower + 24)
                    call_kernel(
                        load_i64(follower), load_i64(follower + 8), begin * ratio, min(end * ratio, last_unit), scratch
                    )
                    follower += 8 * FOLLOWER
                atomic_add(row + 8 * DONE, end - begin)
                found = atomic_load(row + 8 * COUNTER)
            counter = found
        row += 8 * ROW
    if member == 0:
        wait_done(state, group, last, generation, member)


@kernel
def team_publish(args: int, begin: int, end: int, scratch: int) -> None:
    """Let the workers see a new tape. args: state; begin: its generation."""
    forget_cores(args + THREADS + CORE, load_i64(args + MEMBERS))
    atomic_add(args + GENERATION, begin - atomic_load(args + GENERATION))


@kernel
def team_lead(args: int, begin: int, end: int, scratch: int) -> None:
    """Member 0's part of one tape. args: state; begin: its generation."""
    run_ops(args, begin, load_i64(args + THREADS + SCRATCH), 0)


@kernel
def team_work(args: int, begin: int, end: int, scratch: int) -> None:
    """Member `begin`: run tapes as they are published, return after a quiet while with ASLEEP set."""
    own = args + THREADS + begin * PER_THREAD
    seen = load_i64(own + SEEN)
    spins = 0
    while spins < SPIN_IDLE:
        generation = atomic_load(args + GENERATION)
        if generation != seen:
            seen = generation
            store_i64(own + SEEN, seen)
            run_ops(args, seen, load_i64(own + SCRATCH), begin)
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
    """`n_threads` members; `run` is safe to call from several Python threads (they take turns).

    Raises BackendUnavailable, also from a `run` after `close`, when the system gives no more threads.
    """

    def __init__(self, library: Library, n_threads: int):
        self.n_threads = n_threads
        self._library = library
        self._lock = threading.Lock()
        self._memory = np.zeros(THREADS + n_threads * PER_THREAD + ALIGN, np.uint8)
        start = -self._memory.ctypes.data % ALIGN
        self._state = self._memory[start : start + THREADS + n_threads * PER_THREAD].view(np.int64)
        self._address = int(self._state.ctypes.data)
        self._scratch: list[np.ndarray[Any, Any]] = []
        self._wake = [threading.Semaphore(0) for _ in range(n_threads)]
        self._workers: list[threading.Thread] = []
        self._closing = False
        self._generation = 0
        if not jit_disabled():
            library.load(KERNELS)
            self._publish = library.function(team_publish, keep_gil=True)
            self._lead, self._work = library.function(team_lead), library.function(team_work)
            libc, self._state[MEMBERS // 8] = ctypes.CDLL(None), n_threads
            for field, function in ((YIELD, libc.sched_yield), (SLEEP, libc.usleep)):
                self._state[field // 8] = ctypes.cast(function, ctypes.c_void_p).value or 0
            for i, address in enumerate(addresses_of_calls()):
                self._state[SYSTEM // 8 + i] = address
            self._start()  # now, so that a system without threads says so before anything is computed

    def run(self, tape: Tape, batch: Batch) -> None:
        """Load a batch into a tape and run the ops it needs."""
        with self._lock:
            self._load(tape, batch)
            self._run(tape, 0, tape.n_ops)

    def load(self, tape: Tape, batch: Batch) -> None:
        """Load a batch into a tape that is then run in parts."""
        with self._lock:
            self._load(tape, batch)

    def run_part(self, tape: Tape, first: int, last: int) -> None:
        """Run ops first .. last - 1 of a loaded tape; those before them have run."""
        with self._lock:
            self._generation += 1
            tape.arm(self._generation, first, last)
            self._run(tape, first, last)

    def _load(self, tape: Tape, batch: Batch) -> None:
        self._generation += 1
        tape.load(batch, self._generation)
        self._reserve(tape.scratch)

    def _run(self, tape: Tape, first: int, last: int) -> None:
        if jit_disabled():
            tape.run_plain(first, last)
            return
        self._start()
        state, address = self._state, self._address
        state[ROWS // 8], state[N_OPS // 8] = tape.address + 8 * ROW * first, last - first
        if self.n_threads > 1:
            self._publish(address, self._generation, 0, 0)
            for i in range(1, self.n_threads):
                if state[(THREADS + i * PER_THREAD + ASLEEP) // 8]:
                    self._wake[i].release()
        self._lead(address, self._generation, 0, 0)

    def close(self) -> None:
        """End the workers. Idempotent; the team starts again when it is used again."""
        with self._lock:
            self._end()

    def _end(self) -> None:
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
        # Workers read their address at the start of a run, so no run may be under way: `run` holds the lock, but a
        # worker may be late. It holds no unit then, and touches scratch only through one.
        self._scratch = [np.empty(size + ALIGN, np.uint8) for _ in range(self.n_threads)]
        for i, memory in enumerate(self._scratch):
            self._state[(THREADS + i * PER_THREAD + SCRATCH) // 8] = -(-memory.ctypes.data // ALIGN) * ALIGN

    def _start(self) -> None:
        if self._workers or self.n_threads == 1:
            return
        for i in range(1, self.n_threads):
            worker = threading.Thread(target=self._serve, args=(i,), name=f"edgellm-cpu-{i}", daemon=True)
            try:
                worker.start()
            except RuntimeError as error:
                self._end()
                raise BackendUnavailable(
                    f"thread {i + 1} of {self.n_threads} cannot be started ({error}); ask for fewer (--threads)"
                ) from None
            self._workers.append(worker)

    def _serve(self, member: int) -> None:
        wake, asleep = self._wake[member], (THREADS + member * PER_THREAD + ASLEEP) // 8
        while not self._closing:
            self._state[asleep] = 0
            self._work(self._address, member, self.n_threads, 0)
            wake.acquire()
