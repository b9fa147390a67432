"""A member of a team on a core where an earlier one is: where the system says it runs, before and after."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np
import pytest

from edgellm.backends.cpu.cores import (
    CALLS,
    MOVES,
    PERIOD,
    REST,
    SCRATCH_BYTES,
    STRIDE,
    UNKNOWN,
    addresses_of_calls,
    follow_core,
    forget_cores,
)
from edgellm.backends.cpu.jit import Library, jit_disabled, kernel
from edgellm.backends.cpu.simd import load_i64

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="threads cannot be moved here"
)
MEMBERS = 3


@kernel
def follow(args: int, begin: int, end: int, scratch: int) -> None:
    """args: the address of the calls, of the places; begin: the member."""
    follow_core(load_i64(args), load_i64(args + 8), MEMBERS, begin, scratch)


@kernel
def forget(args: int, begin: int, end: int, scratch: int) -> None:
    forget_cores(load_i64(args + 8), MEMBERS)


class Place:
    """What a team knows of its members' cores."""

    def __init__(self, compiled):
        library = Library()
        self.follow = library.function(follow) if compiled else follow
        self.forget = library.function(forget) if compiled else forget
        self.calls = np.array(addresses_of_calls(), np.int64)
        self.cores = np.zeros(MEMBERS * STRIDE // 8, np.int64)
        self.cores[:: STRIDE // 8] = UNKNOWN
        self.scratch = np.full(SCRATCH_BYTES, 0xFF, np.uint8)
        self.args = np.array([self.calls.ctypes.data, self.cores.ctypes.data], np.int64)

    def core_of(self, member):
        return self.cores[member * STRIDE // 8 : member * STRIDE // 8 + 1]

    def run(self, member, allowed=None, known=None):
        """Core before and after, and the set of allowed cores afterwards, of a thread of its own."""
        found = []

        def body():
            here = os.sched_getaffinity(0)
            start = min(here) if allowed is None else min(allowed)
            os.sched_setaffinity(0, {start})
            before = ctypes.CDLL(None).sched_getcpu()
            os.sched_setaffinity(0, here if allowed is None else allowed)
            for other, core in (known or {}).items():
                self.core_of(other)[0] = before if core == "same" else core
            # Between these two lines the system may move the thread, too; then it has left by itself.
            self.follow(self.args.ctypes.data, member, member + 1, self.scratch.ctypes.data)
            found.extend((before, int(self.core_of(member)[0]), os.sched_getaffinity(0)))

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        return found


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.skipif(jit_disabled(), reason="no JIT")), False])
def place(request):
    return Place(request.param)


def test_a_later_member_leaves_the_core_of_an_earlier_one(place):
    before, after, allowed = place.run(1, known={0: "same"})
    assert after != before and after in allowed
    assert allowed == os.sched_getaffinity(0)


def test_it_goes_where_no_other_member_is(place):
    cores = sorted(os.sched_getaffinity(0))
    taken = cores[1:-1][: MEMBERS - 2]
    _, after, _ = place.run(1, known={0: "same"} | {2 + i: core for i, core in enumerate(taken)})
    assert after not in (cores[0], *taken)


def test_it_does_not_move_for_ever(place):
    """Where other programs want every core, moving costs more than sharing."""
    moves = []
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
    system = {
        "sched_getaffinity": call(lambda thread, size, mask, _: ctypes.memset(mask, 0xFF, size) and None),
        "sched_setaffinity": call(lambda *args: moves.append(args)),
    }
    for name, function in system.items():
        place.calls[CALLS.index(name)] = ctypes.cast(function, ctypes.c_void_p).value
    here, began = {min(os.sched_getaffinity(0))}, place.cores[STRIDE // 8 + 1 :]
    began[0] = time.monotonic_ns() + 3600 * 10**9  # so that a slow machine does not begin to count anew meanwhile
    for _ in range(MOVES + 3):
        place.run(1, allowed=here, known={0: "same"})
    assert len(moves) == 2 * MOVES
    assert 0 <= time.monotonic_ns() - (began[0] + PERIOD - REST) < 60 * 10**9, "it rests from the first refusal on"
    began[0] -= REST
    place.run(1, allowed=here, known={0: "same"})
    assert len(moves) == 2 * (MOVES + 1)


def test_where_every_core_is_taken_it_stays(place):
    core = min(os.sched_getaffinity(0))
    assert place.run(1, allowed={core}, known={0: "same"}) == [core, core, {core}]


def test_an_earlier_member_and_one_alone_only_note_where_they_are(place):
    core = min(os.sched_getaffinity(0))
    assert place.run(0, allowed={core}, known={1: "same"}) == [core, core, {core}]
    place.forget(place.args.ctypes.data, 0, 1, 0)
    assert all(place.core_of(member)[0] == UNKNOWN for member in range(MEMBERS))
    assert place.run(1, allowed={core}) == [core, core, {core}]


def test_without_the_calls_nothing_is_done(place):
    place.calls[1:] = 0
    assert place.run(1, known={0: "same"})[1] == UNKNOWN
