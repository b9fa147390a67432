"""A forward pass as data: recorded once per batch shape, replayed by the team of threads in one call.

An op on the tape is a kernel, a number of units, and an int64 argument array. Recording also plans memory (a handle
that dies gives its buffer back) and barriers: one is put before an op only if the op touches memory that an op since
the last barrier wrote, or writes memory that such an op read. An op whose unit needs only what one unit of an op since
the last barrier made *follows* it: the same thread calls it right after, while the numbers are in its cache, and no
barrier is needed. What differs from step to step (ids, positions, block
tables ...) is copied into fixed arrays before each run.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import Batch
from edgellm.backends.cpu.jit import Kernel

__all__ = ["Arena", "Buf", "Span", "Tape", "float_bits"]

ALIGN = 64
CHUNK = 1 << 22
Span = tuple[int, int]
"""Address and length in bytes of memory that an op touches."""

# Fields of an op's row, int64 each: a cache line for the op, one that changes, one for ops that follow it.
KERNEL, UNITS, STEP, BARRIER, ARGS, N_FOLLOWERS, ROW = 0, 1, 2, 3, 4, 5, 24
COUNTER, DONE = 8, 9
"""Next unit to claim, with the run's generation in the upper half; units that are done."""
FOLLOWERS, FOLLOWER = 16, 4
"""Where the followers start, and the size of one: kernel, arguments, its units per unit of the op, its units."""


def float_bits(x: float) -> int:
    """A float32 as the integer that `float_of_bits` reads."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


class Arena:
    """Memory for activations, shared by all tapes of a backend (only one runs at a time). Chunks never move."""

    def __init__(self) -> None:
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._index = self._offset = 0
        self._free: dict[int, deque[int]] = defaultdict(deque)
        self._rows: list[npt.NDArray[np.int64]] = []

    @property
    def nbytes(self) -> int:
        """Bytes reserved (memory is taken when it is first written)."""
        return sum(c.nbytes for c in self._chunks)

    def restart(self) -> None:
        """Begin a new recording: everything is free again."""
        self._index = self._offset = 0
        self._free.clear()

    def take(self, size: int) -> int:
        """Address of `size` bytes, 64-byte aligned; the longest-free buffer of that size, or fresh memory."""
        size = -(-max(size, 1) // ALIGN) * ALIGN
        if self._free[size]:
            return self._free[size].popleft()
        while self._index < len(self._chunks):
            chunk = self._chunks[self._index]
            start = -(-(chunk.ctypes.data + self._offset) // ALIGN) * ALIGN
            if start + size <= chunk.ctypes.data + chunk.nbytes:
                self._offset = start + size - chunk.ctypes.data
                return start
            self._index, self._offset = self._index + 1, 0
        self._chunks.append(np.empty(max(size + ALIGN, CHUNK), np.uint8))
        return self.take(size)

    def take_rows(self, count: int) -> npt.NDArray[np.int64]:
        """A table of tape rows, aligned to cache lines. A late thread may look at one (not: work on it) after its tape
        is gone, so tables are kept for the next tape and never freed."""
        size = max(64, 1 << (count - 1).bit_length())
        for i, table in enumerate(self._rows):
            if len(table) == size:
                return self._rows.pop(i)
        return _aligned(size, ROW)

    def give_back_rows(self, table: npt.NDArray[np.int64]) -> None:
        """Keep a table for the next tape."""
        self._rows.append(table)

    def give_back(self, address: int, size: int) -> None:
        """Free what `take` gave."""
        self._free[-(-max(size, 1) // ALIGN) * ALIGN].append(address)


class _Storage:
    """Memory behind one or more handles. `derived` keeps forms made from it once (quantised rows)."""

    def __init__(self, address: int, nbytes: int):
        self.address, self.nbytes = address, nbytes
        self.derived: dict[Any, Any] = {}


class Buf:
    """A handle on an activation: contiguous, float32 unless its user says otherwise."""

    def __init__(self, storage: _Storage, shape: tuple[int, ...]):
        self.storage, self.shape = storage, shape

    @property
    def address(self) -> int:
        """Where it starts."""
        return self.storage.address

    @property
    def span(self) -> Span:
        """All of its memory."""
        return self.storage.address, self.storage.nbytes

    @property
    def derived(self) -> dict[Any, Any]:
        """Forms made from this buffer, by any key; they live as long as it does."""
        return self.storage.derived

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def reshape(self, *shape: int) -> Buf:
        """The same memory under another shape; one length may be -1."""
        if -1 in shape:
            rest = -math.prod(shape)
            shape = tuple(self.size // rest if n == -1 else n for n in shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"cannot reshape {self.shape} to {shape}")
        return Buf(self.storage, shape)


@dataclass
class _Op:
    kernel: Kernel
    args: int
    units: int
    step: int
    barrier: bool
    followers: list[tuple[Kernel, int, int, int]] = field(default_factory=list)


class Tape:
    """Ops of one forward pass for one batch shape. `batch` holds the fixed arrays that kernels read."""

    def __init__(self, arena: Arena, batch: Batch, table_widths: Sequence[int]):
        self._arena = arena
        self._recording = True
        self._ops: list[_Op] = []
        self._makers: dict[int, tuple[_Op, int]] = {}
        """Since the last barrier: address of an output -> the op that made it, elements of it per unit."""
        self.arguments: list[npt.NDArray[np.int64]] = []
        self._keep: list[Any] = []
        self._reads: list[Span] = []
        self._writes: list[Span] = []
        self.scratch = 0
        self.replay: list[Callable[[Batch], None]] = []
        self.shared: dict[Any, Any] = {}
        """Things made once per tape (rotary tables, attention plans), by any key."""
        self.output: npt.NDArray[np.float32] | None = None
        self.rows: npt.NDArray[np.int64] = np.zeros((0, ROW), np.int64)
        tables = tuple(
            np.zeros((batch.n_seqs, w), np.int32) for _, w in zip(batch.block_tables, table_widths, strict=True)
        )
        own = {name: np.zeros(len(getattr(batch, name)), np.int32) for name in FIELDS}
        self.batch = replace(batch, block_tables=tables, **own)

    # Recording.
    def new(self, *shape: int, itemsize: int = 4) -> Buf:
        """Memory for an activation of this shape."""
        nbytes = math.prod(shape) * itemsize
        storage = _Storage(self._arena.take(nbytes), nbytes)
        weakref.finalize(storage, self._release, storage.address, nbytes).atexit = False
        return Buf(storage, shape)

    def external(self, array: npt.NDArray[Any]) -> Buf:
        """A handle on an array that something outside the tape fills before each run."""
        self._keep.append(array)
        return Buf(_Storage(array.ctypes.data, array.nbytes), array.shape)

    def _release(self, address: int, nbytes: int) -> None:
        if self._recording:
            self._arena.give_back(address, nbytes)

    def op(
        self,
        kernel: Kernel,
        units: int,
        args: Sequence[Any],
        reads: Sequence[Buf | Span] = (),
        writes: Sequence[Buf | Span] = (),
        step: int = 1,
        scratch: int = 0,
        grain: tuple[Buf, int] | None = None,
    ) -> int:
        """Append an op; returns its number (-1: it follows another). `args`: ints, floats (passed as bits), Bufs and
        arrays (as addresses; the arrays are kept alive). Threads take `step` units at a time, 0: a share
        of what is left (units of equal cost, in the order of their data). `scratch`: bytes each thread needs. `grain`
        (x, n): unit u reads elements u * n .. (u + 1) * n of x and none else of it, and writes nothing that another
        unit touches; if the first of `writes` has x's size, it writes those elements of it."""
        read = [s.span if isinstance(s, Buf) else s for s in reads]
        written = [s.span if isinstance(s, Buf) else s for s in writes]
        self.arguments.append(np.array([self._argument(a) for a in args], np.int64))
        address = self.arguments[-1].ctypes.data
        self.scratch = max(self.scratch, scratch)
        made = None if grain is None else self._followed(grain, read, written)
        barrier = _overlap(read, self._writes) or _overlap(written, self._writes) or _overlap(written, self._reads)
        if made is not None and grain is not None:
            op, ratio = made
            op.followers.append((kernel, address, ratio, units))
        else:
            if barrier:
                self._reads, self._writes = [], []
                self._makers.clear()
            op = _Op(kernel, address, units, step, barrier)
            self._ops.append(op)
        self._reads += read
        self._writes += written
        if grain is not None and writes and isinstance(writes[0], Buf) and writes[0].size == grain[0].size:
            ratio = 1 if made is None else made[1]
            self._makers[writes[0].address] = op, grain[1] * ratio
        return len(self._ops) - 1 if made is None else -1

    def _followed(self, grain: tuple[Buf, int], read: list[Span], written: list[Span]) -> tuple[_Op, int] | None:
        """The op since the last barrier that this one can follow, and its units per unit of that op."""
        x, n = grain
        op, elements = self._makers.get(x.address, (None, 0))
        if op is None or elements % n or len(op.followers) * FOLLOWER >= ROW - FOLLOWERS:
            return None
        others = [s for s in self._writes if s != x.span]
        if _overlap([s for s in read if s != x.span], others) or _overlap(written, self._reads + self._writes):
            return None
        return op, elements // n

    def _argument(self, value: Any) -> int:
        if isinstance(value, Buf):
            return value.address
        if isinstance(value, np.ndarray):
            self._keep.append(value)
            return value.ctypes.data
        return float_bits(float(value)) if isinstance(value, (float, np.floating)) else int(value)

    def keep(self, things: Sequence[Any]) -> None:
        """Keep objects alive as long as the tape."""
        self._keep += things

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels of all ops."""
        return [kernel for kernel, _, _ in self.calls()]

    def calls(self) -> Iterator[tuple[Kernel, int, int]]:
        """(kernel, address of its arguments, units) of every op in an order that one thread could take."""
        for i, op in enumerate(self._ops):
            yield op.kernel, op.args, int(self.rows[i, UNITS]) if len(self.rows) else op.units
            yield from ((kernel, args, units) for kernel, args, _, units in op.followers)

    def set_units(self, op: int, units: int) -> None:
        """Change how many units an op has in the next run (from a `replay` callback)."""
        self.rows[op, UNITS] = units

    def abandon(self) -> None:
        """End a recording that failed: its handles must not give memory back to a later one."""
        self._recording = False

    def finish(self, output: Buf, address_of: Callable[[Kernel], int]) -> None:
        """End the recording: resolve kernels and lay out the rows."""
        self._recording = False
        table = self._arena.take_rows(len(self._ops))
        weakref.finalize(self, self._arena.give_back_rows, table).atexit = False
        table[:, COUNTER] = 0  # before the other fields, see `run_ops`
        self.rows = table[: len(self._ops)]
        for row, op in zip(self.rows, self._ops, strict=True):
            head = (address_of(op.kernel), op.units, op.step, int(op.barrier), op.args, len(op.followers))
            row[: len(head)] = head
            for i, (kernel, args, ratio, units) in enumerate(op.followers):
                at = FOLLOWERS + FOLLOWER * i
                row[at : at + FOLLOWER] = address_of(kernel), args, ratio, units
        self.output = _array(output.address, output.shape)
        self.shared.clear()

    # Replaying.
    def load(self, batch: Batch, generation: int) -> None:
        """Copy a batch of the recorded shape into the fixed arrays and run the replay callbacks. The counters come
        first: a late thread of an earlier run must find nothing to claim."""
        self.rows[:, COUNTER] = generation << 32
        self.rows[:, DONE] = 0
        for name in FIELDS:
            getattr(self.batch, name)[:] = getattr(batch, name)
        for own, given in zip(self.batch.block_tables, batch.block_tables, strict=True):
            width = min(own.shape[1], given.shape[1])
            own[:, :width] = given[:, :width]
        for callback in self.replay:
            callback(batch)

    def run_plain(self) -> None:
        """Run every op as plain Python, in order (JIT disabled)."""
        scratch = np.zeros(self.scratch + ALIGN, np.uint8)
        for kernel, args, units in self.calls():
            kernel(args, 0, units, -(-scratch.ctypes.data // ALIGN) * ALIGN)


FIELDS = ("ids", "positions", "seq_starts", "context_lens", "output_rows", "rope_variants")


def _overlap(a: list[Span], b: list[Span]) -> bool:
    return any(x < v + n and v < x + m for x, m in a for v, n in b)


def _aligned(rows: int, columns: int) -> npt.NDArray[np.int64]:
    memory = np.zeros(rows * columns * 8 + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + rows * columns * 8].view(np.int64).reshape(rows, columns)


def _array(address: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    import ctypes

    kind = ctypes.c_float * math.prod(shape)
    return np.ctypeslib.as_array(kind.from_address(address)).reshape(shape)
