"""A forward pass as data: recorded once for a class of batch shapes, replayed by the team of threads in one call.

An op on the tape is a kernel, a number of units, and an int64 argument array. Recording also plans memory (a handle
that dies gives its buffer back) and barriers: one is put before an op only if the op touches memory that an op since
the last barrier wrote, or writes memory that such an op read. An op whose unit needs only what one unit of an op since
the last barrier made *follows* it: the same thread calls it right after, while the numbers are in its cache, and no
barrier is needed. What differs from step to step is written before each run: ids, positions, block tables ... into
fixed arrays, what counts rows (rows.py) into the ops.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import Batch
from edgellm.backends.cpu.arena import ALIGN, Arena, Buf, Span, Storage
from edgellm.backends.cpu.jit import Kernel
from edgellm.backends.cpu.rows import OUTPUTS, TOKENS, Growing, Rows

__all__ = ["Shape", "Tape", "float_bits"]

# Fields of an op's row, int64 each: a cache line for the op, one that changes, one for ops that follow it.
KERNEL, UNITS, STEP, BARRIER, ARGS, N_FOLLOWERS, ROW = 0, 1, 2, 3, 4, 5, 24
COUNTER, DONE = 8, 9
"""Next unit to claim, with the run's generation in the upper half; units that are done."""
FOLLOWERS, FOLLOWER = 16, 4
"""Where the followers start, and the size of one: kernel, arguments, its units per unit of the op, its units."""


def float_bits(x: float) -> int:
    """A float32 as the integer that `float_of_bits` reads."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


@dataclass
class _Op:
    kernel: Kernel
    args: int
    """Where its arguments start among all of the tape's."""
    units: int
    step: int
    barrier: bool
    followers: list[tuple[Kernel, int, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Shape:
    """What one recording serves: steps of up to so many rows, sequences, rows of output, and blocks in the tables."""

    n_tokens: int
    n_seqs: int
    n_out: int
    widths: tuple[int, ...]
    decode: bool
    """One row for each sequence."""


class Tape:
    """Ops of one forward pass for the batches of a shape. `batch` holds the fixed arrays that kernels read."""

    def __init__(self, arena: Arena, shape: Shape):
        self._arena, self.shape = arena, shape
        self.n_tokens, self.n_out = Rows(shape.n_tokens, TOKENS), Rows(shape.n_out, OUTPUTS)
        self._recording = True
        self._ops: list[_Op] = []
        self._makers: dict[int, tuple[_Op, int]] = {}
        """Since the last barrier: address of an output -> the op that made it, elements of it per unit."""
        self._args: list[int] = []
        self.arguments: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Those of all ops, one after another."""
        self._growing: list[Growing] = []
        self._counts: tuple[int, int] = (-1, -1)
        self._n_stored = 0
        self._keep: list[Any] = []
        self._reads: list[Span] = []
        self._writes: list[Span] = []
        self.scratch = 0
        self.replay: list[Callable[[Batch], None]] = []
        self.shared: dict[Any, Any] = {}
        """Things made once per tape (rotary tables, attention plans), by any key."""
        self._output: npt.NDArray[np.float32] = np.zeros(0, np.float32)
        self._largest: npt.NDArray[np.float32] = np.zeros((0, 2), np.float32)
        self._output_rows = 0
        self.rows: npt.NDArray[np.int64] = np.zeros((0, ROW), np.int64)
        self.address = 0
        """Where the rows of the ops start."""
        tokens, seqs = shape.n_tokens, shape.n_seqs
        sizes = (tokens, tokens, seqs + 1, seqs, shape.n_out, tokens)
        tables = tuple(np.zeros((seqs, width), np.int32) for width in shape.widths)
        own = {name: np.zeros(size, np.int32) for name, size in zip(FIELDS, sizes, strict=True)}
        self.batch = Batch(block_tables=tables, **own)

    def new(self, *shape: int, itemsize: int = 4) -> Buf:
        """Memory for an activation of this shape."""
        nbytes = int(size := math.prod(shape)) * itemsize
        return Buf(Storage(self._arena.take(nbytes), nbytes, self._release), shape, size)

    def external(self, array: npt.NDArray[Any], *shape: int) -> Buf:
        """A handle on an array that something outside the tape fills before each run."""
        self._keep.append(array)
        return Buf(Storage(array.ctypes.data, array.nbytes), shape)

    def count(self, array: npt.NDArray[Any]) -> int:
        """Length of an array with an entry per row: Rows where it is one of the batch's."""
        if array is self.batch.output_rows:
            return self.n_out
        return self.n_tokens if any(array is getattr(self.batch, name) for name in BY_TOKEN) else len(array)

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
        of what is left (units of equal cost, in the order of their data: threads that write to the same cache line
        hold each other up, so neighbours should go to one). `scratch`: bytes each thread needs. `grain`
        (x, n): unit u reads elements u * n .. (u + 1) * n of x and none else of it, and writes nothing that another
        unit touches; if the first of `writes` has x's size, it writes those elements of it."""
        read = [s.span if isinstance(s, Buf) else s for s in reads]
        written = [s.span if isinstance(s, Buf) else s for s in writes]
        place = len(self._args)
        self._args += [a if type(a) is int else self._argument(a) for a in args]
        self.scratch = max(self.scratch, scratch)
        made = None if grain is None else self._followed(grain, read, written)
        barrier = _overlap(read, self._writes) or _overlap(written, self._writes) or _overlap(written, self._reads)
        if made is not None and grain is not None:
            op, ratio = made
            op.followers.append((kernel, place, ratio, units))
        else:
            if barrier:
                self._reads, self._writes = [], []
                self._makers.clear()
            op = _Op(kernel, place, units, step, barrier)
            self._ops.append(op)
        self._reads += read
        self._writes += written
        if grain is not None and writes and isinstance(writes[0], Buf) and writes[0].size == grain[0].size:
            ratio = 1 if made is None else made[1]
            self._makers[writes[0].address] = op, grain[1] * ratio
        return len(self._ops) - 1 if made is None else -1

    def stored(self) -> None:
        """The last op wrote to the cache: it and those before it are all that a batch without output rows needs."""
        self._n_stored = len(self._ops)

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
        if isinstance(value, int):
            return value
        return float_bits(float(value)) if isinstance(value, (float, np.floating)) else int(value)

    def keep(self, things: Sequence[Any]) -> None:
        """Keep objects alive as long as the tape."""
        self._keep += things

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels of all ops."""
        return [kernel for op in self._ops for kernel in (op.kernel, *(f[0] for f in op.followers))]

    def calls(self, first: int = 0, last: int | None = None) -> Iterator[tuple[Kernel, int, int]]:
        """(kernel, address of its arguments, units) of every op in an order that one thread could take, as loaded."""
        for op, row in zip(self._ops[first:last], self.rows[first:last].tolist(), strict=True):
            yield op.kernel, row[ARGS], row[UNITS]
            for i, (kernel, _, _, _) in enumerate(op.followers):
                _, args, _, units = row[FOLLOWERS + FOLLOWER * i :][:FOLLOWER]
                yield kernel, args, units

    def set_units(self, op: int, units: int, step: int = 1) -> None:
        """Change how many units an op has in the next run, and how they are taken (from a `replay` callback)."""
        self.rows[op, UNITS], self.rows[op, STEP] = units, step

    def abandon(self) -> None:
        """End a recording that failed: its handles must not give memory back to a later one."""
        self._recording = False

    def finish(self, output: Buf, address_of: Callable[[Kernel], int], largest: Buf | None = None) -> None:
        """End the recording: resolve kernels and lay out arguments and rows. `largest`: what was found of the output's
        rows."""
        self._recording = False
        self.arguments = np.array(self._args, np.int64)
        base = self.arguments.ctypes.data
        addresses = {kernel: address_of(kernel) for kernel in set(self.kernels)}
        table = self._arena.take_rows(len(self._ops), ROW)
        weakref.finalize(self, self._arena.give_back_rows, table).atexit = False
        table[:, COUNTER] = 0  # before the other fields, see `run_ops`
        self.rows = table[: len(self._ops)]
        self.address = int(table.ctypes.data)
        heads = [
            (addresses[op.kernel], op.units, op.step, op.barrier, base + 8 * op.args, len(op.followers))
            for op in self._ops
        ]
        self.rows[:, [KERNEL, UNITS, STEP, BARRIER, ARGS, N_FOLLOWERS]] = np.array(heads, np.int64).reshape(-1, 6)
        units = [(ROW * i + UNITS, op.units) for i, op in enumerate(self._ops)]
        for i, op in enumerate(self._ops):
            for j, (kernel, args, ratio, last) in enumerate(op.followers):
                at = FOLLOWERS + FOLLOWER * j
                self.rows[i, at : at + FOLLOWER] = addresses[kernel], base + 8 * args, ratio, last
                units.append((ROW * i + at + FOLLOWER - 1, last))
        self._growing = [Growing(self.arguments, enumerate(self._args)), Growing(self.rows.reshape(-1), units)]
        self._output, self._output_rows = _array(output.address, output.shape), output.shape[0]
        if largest is not None:
            self._largest = _array(largest.address, largest.shape)
        self._args.clear()
        self.shared.clear()

    def load(self, batch: Batch, generation: int) -> None:
        """Copy a batch of the recorded shape into the fixed arrays and run the replay callbacks. The counters come
        first: a late thread of an earlier run must find nothing to claim."""
        self.arm(generation, 0, len(self.rows))
        counts = batch.n_tokens, len(batch.output_rows)
        if counts != self._counts:
            self._counts = counts
            for growing in self._growing:
                growing.set(np.array(counts))
        self.arm(0, self.n_ops, len(self.rows))  # not run: no thread may claim them, however late it is
        for name in FIELDS:
            given = getattr(batch, name)
            getattr(self.batch, name)[: len(given)] = given
        for own, table in zip(self.batch.block_tables, batch.block_tables, strict=True):
            width = min(own.shape[1], table.shape[1])
            own[: len(table), :width] = table[:, :width]
        for callback in self.replay:
            callback(batch)

    def arm(self, generation: int, first: int, last: int) -> None:
        """Make the units of ops first .. last - 1 claimable by that generation."""
        self.rows[first:last, COUNTER] = generation << 32
        self.rows[first:last, DONE] = 0

    @property
    def n_ops(self) -> int:
        """How many of the ops the batch that was loaded needs: where no rows are wanted, none after the last store."""
        return len(self.rows) if self.loaded(self._output_rows) else self._n_stored

    @property
    def output(self) -> npt.NDArray[np.float32]:
        """The result of the batch that was loaded, in memory that the next run overwrites."""
        return self._output[: self.loaded(self._output_rows)]

    @property
    def largest(self) -> npt.NDArray[np.float32]:
        """As `output`, of each of its rows the largest value and its position; nothing where they were not recorded."""
        return self._largest[: self.loaded(self._output_rows)]

    def loaded(self, n: int) -> int:
        """A number of rows in the batch that was loaded."""
        return n.of(self._counts) if isinstance(n, Rows) else n

    def run_plain(self, first: int = 0, last: int | None = None) -> None:
        """Run ops as plain Python, in order (JIT disabled)."""
        scratch = np.zeros(self.scratch + ALIGN, np.uint8)
        for kernel, args, units in self.calls(first, last):
            kernel(args, 0, units, -(-scratch.ctypes.data // ALIGN) * ALIGN)


FIELDS = ("ids", "positions", "seq_starts", "context_lens", "output_rows", "rope_variants")
BY_TOKEN = ("ids", "positions", "rope_variants")


def _overlap(a: list[Span], b: list[Span]) -> bool:
    for x, m in a:
        for v, n in b:
            if x < v + n and v < x + m:
                return True
    return False


def _array(address: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    import ctypes

    kind = ctypes.c_float * int(math.prod(shape))
    return np.ctypeslib.as_array(kind.from_address(address)).reshape(shape)
