"""Which core each member of a team runs on, and how one leaves a core that it shares with another.

When a program of higher priority takes a core, the system moves the thread that ran there behind another member. A
shared core makes each wait while the other one holds what it waits for, and it stays shared for some milliseconds
after the first one is free again. So the later member goes back and queues there: it holds no work then, the
others go on without it, and it is back in the instant at which there is time for it. Not for ever: where other
programs want all cores all the time, members that share one are better off (they run and wait together).

Linux only; elsewhere the calls are missing and threads stay where they are. Members are known by their place in
`places`, STRIDE bytes each: the core or UNKNOWN, when the member last began to count its moves, and how many they were.
"""

from __future__ import annotations

import ctypes
import time

from edgellm.backends.cpu.jit import inline
from edgellm.backends.cpu.simd import atomic_load, atomic_store, load_i64, store_i64
from edgellm.backends.cpu.simd_call import call_int, call_kernel

__all__ = [
    "CALLS",
    "MOVES",
    "PERIOD",
    "REST",
    "SCRATCH_BYTES",
    "STRIDE",
    "UNKNOWN",
    "addresses_of_calls",
    "follow_core",
    "forget_cores",
    "nanoseconds",
]

UNKNOWN = -1
MOVES, PERIOD = 3, 100_000_000
"""A member that would move more often in so many nanoseconds ..."""
REST = 2_000_000_000
"""... stays where it is for so many. (Moves cost a prompt a third of its speed beside two programs on two cores.)"""
MASK = 128
"""Bytes of a set of cores: 1024 of them. On a machine with more the system refuses to tell, and nobody moves."""
SCRATCH_BYTES = 2 * MASK
STRIDE = 128 + SCRATCH_BYTES
CALLS = ("clock_gettime", "sched_getcpu", "sched_getaffinity", "sched_setaffinity")
CLOCK, GETCPU, GET_MASK, SET_MASK = 0, 8, 16, 24
MONOTONIC = getattr(time, "CLOCK_MONOTONIC", 1)


def addresses_of_calls() -> list[int]:
    """Of CALLS in the C library, 0 for one that it lacks."""
    libc = ctypes.CDLL(None)
    found = [getattr(libc, name, None) for name in CALLS]
    return [(function and ctypes.cast(function, ctypes.c_void_p).value) or 0 for function in found]


@inline
def forget_cores(places: int, n_members: int) -> None:
    """Nobody is known to be anywhere: members that have slept may have been moved."""
    for i in range(n_members):
        atomic_store(places + STRIDE * i, UNKNOWN)


@inline
def nanoseconds(calls: int, scratch: int) -> int:
    """A clock that only goes forward. `calls`: the addresses of CALLS; `scratch`: 16 bytes of the caller's own."""
    call_kernel(load_i64(calls + CLOCK), MONOTONIC, scratch, 0, 0)
    return load_i64(scratch) * 1_000_000_000 + load_i64(scratch + 8)


@inline
def _note(calls: int, place: int) -> int:
    """The core that this thread runs on, written to its place when it has changed."""
    core = call_int(load_i64(calls + GETCPU))
    if load_i64(place) != core:
        atomic_store(place, core)
    return core


@inline
def _may_move(calls: int, place: int, scratch: int) -> int:
    """Count a move; 0 when there have been too many."""
    now, moves = nanoseconds(calls, scratch), load_i64(place + 16) + 1
    if now - load_i64(place + 8) > PERIOD:
        store_i64(place + 8, now)
        moves = 1
    if moves == MOVES + 1:
        store_i64(place + 8, now + REST - PERIOD)
    store_i64(place + 16, moves)
    if moves > MOVES:
        return 0
    return 1


@inline
def _free_cores(calls: int, places: int, n_members: int, place: int, allowed: int, free: int) -> int:
    """Writes the sets of cores that this thread may use, and of those on which no other member was seen; 0 if that
    one is empty."""
    for i in range(0, 2 * MASK, 8):
        store_i64(allowed + i, 0)
    call_kernel(load_i64(calls + GET_MASK), 0, MASK, allowed, 0)
    for i in range(0, MASK, 8):
        store_i64(free + i, load_i64(allowed + i))
    for i in range(n_members):
        core = atomic_load(places + STRIDE * i)
        if places + STRIDE * i != place and core >= 0 and core < 8 * MASK:
            word = free + core // 64 * 8
            store_i64(word, load_i64(word) & ~(1 << core % 64))
    left = 0
    for i in range(0, MASK, 8):
        left |= load_i64(free + i)
    return left


@inline
def follow_core(calls: int, places: int, n_members: int, member: int, scratch: int) -> None:
    """Note where `member`, the caller, runs; if that is where an earlier one was last seen, go to a core without
    members (this returns once it runs there). The thread's set of allowed cores is afterwards what it was.

    `calls`: the addresses of CALLS; `scratch`: SCRATCH_BYTES of the caller's own.
    """
    if load_i64(calls + GETCPU) == 0 or load_i64(calls + SET_MASK) == 0:
        return
    place = places + STRIDE * member
    core = _note(calls, place)
    shared = 0
    for i in range(member):
        if atomic_load(places + STRIDE * i) == core:
            shared = 1
    if shared == 0 or _may_move(calls, place, scratch) == 0:
        return
    if _free_cores(calls, places, n_members, place, scratch, scratch + MASK) != 0:
        call_kernel(load_i64(calls + SET_MASK), 0, MASK, scratch + MASK, 0)
        call_kernel(load_i64(calls + SET_MASK), 0, MASK, scratch, 0)
        _note(calls, place)
