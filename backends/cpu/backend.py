"""The CPU backend: ops append to a tape; `execute` records a forward pass once per kind of batch and replays it."""

from __future__ import annotations

import logging
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import AttentionSpec, Backend, Batch, KVPages, KVSpec, QTensor, RopeSpec, RouteSpec
from edgellm.backends.cpu.arena import Arena, Buf
from edgellm.backends.cpu.attention_record import record_attention
from edgellm.backends.cpu.converted import as_q8_0, q8_0_bytes
from edgellm.backends.cpu.elementwise import (
    record_activate,
    record_add,
    record_columns,
    record_concat,
    record_norm,
    record_scale,
    record_take,
)
from edgellm.backends.cpu.embed import record_embed
from edgellm.backends.cpu.experts import record_combine, record_expert_linear, record_head_linear, record_route
from edgellm.backends.cpu.jit import Library
from edgellm.backends.cpu.kv import CPUPages, new_pages, record_store
from edgellm.backends.cpu.largest import record_largest
from edgellm.backends.cpu.matmul import QUANTISED, record_matmul
from edgellm.backends.cpu.matmul_float import record_float_matmul
from edgellm.backends.cpu.passes import CPUPass, OpTimes
from edgellm.backends.cpu.quantise import panel_of
from edgellm.backends.cpu.rope import record_rope
from edgellm.backends.cpu.rows import room
from edgellm.backends.cpu.simd_op import ISA
from edgellm.backends.cpu.tape import Shape, Tape
from edgellm.backends.cpu.team import Team, default_threads
from edgellm.backends.dequant import dequantise
from edgellm.errors import UnsupportedModel
from edgellm.quants import QUANT_TABLE, GGMLType

__all__ = ["CPUBackend", "CPUWeight"]

log = logging.getLogger("edgellm")
Progress = Callable[[int, int, str], None]
MAX_TAPES = 48
PASS_ROWS = 128
"""Rows that a pass beside running answers is recorded for at least: whatever it computes then takes one recording."""
FLOATS = ("F32", "F16", "BF16")
EMBEDDING = "token_embd.weight"


class CPUWeight:
    """A weight: the file's own bytes, or float32 values for vectors (norms, biases, sinks)."""

    def __init__(self, tensor: QTensor):
        self.tensor, self.shape = tensor, tensor.shape
        self._values: npt.NDArray[np.float32] | None = None

    @cached_property
    def rows(self) -> QTensor:
        """What products read: the file's own rows, or Q8_0 in their place where there is no kernel for their type."""
        if _is_converted(self.tensor):
            return as_q8_0(self.tensor)
        if not _has_kernel(self.tensor):
            kind = self.tensor.type.name
            raise UnsupportedModel(f"{self.tensor.name} is of type {kind}, which the CPU backend cannot multiply")
        return self.tensor

    @property
    def address(self) -> int:
        """Where the rows of `rows` start."""
        return int(self.rows.data.ctypes.data)

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """All values as float32 (of small weights: made once and kept)."""
        if self._values is None:
            flat = dequantise(self.tensor.data, self.tensor.type)
            self._values = np.ascontiguousarray(flat, np.float32).reshape(self.shape)
        return self._values


def _has_kernel(tensor: QTensor) -> bool:
    return tensor.type.name in FLOATS or tensor.type.name in QUANTISED


def _is_converted(tensor: QTensor) -> bool:
    """Whether products need the tensor in another type than the file's (vectors are never multiplied with)."""
    in_blocks = QUANT_TABLE[tensor.type].block_size > 1 and tensor.shape[-1] % 32 == 0
    return len(tensor.shape) > 1 and in_blocks and not _has_kernel(tensor)


def _values(weight: CPUWeight | None) -> npt.NDArray[np.float32] | None:
    return None if weight is None else weight.values


class CPUBackend(Backend):
    """Kernels of this folder on a team of threads. `threads` None: physical cores. `progress(done, total, name)` hears
    of kernels that must be compiled."""

    name = "cpu"
    can_pause = True
    reads_maps = True

    def __init__(self, threads: int | None = None, progress: Progress | None = None):
        self.threads = threads or default_threads()
        self.progress = progress
        self.library = Library()
        self._team = Team(self.library, self.threads)
        self._arena, self._pass_arena = Arena(), Arena()
        self._pass_times: OpTimes | None = None
        self._tapes: OrderedDict[Any, Tape] = OrderedDict()
        self._lock = threading.RLock()
        self._recording: Tape | None = None
        self._told: set[GGMLType] = set()

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "isa": ISA}

    def load(self, tensor: QTensor) -> CPUWeight:
        weight = CPUWeight(tensor)
        if _is_converted(tensor) and tensor.name != EMBEDDING:
            if tensor.type not in self._told:
                kind = tensor.type.name
                log.warning("the CPU backend has no kernel for %s: such weights are kept in memory as Q8_0", kind)
                self._told.add(tensor.type)
            _ = weight.rows  # now, not when the first request waits for it
        return weight

    def weight_bytes(self, tensor: QTensor) -> int:
        kept = int(tensor.data.nbytes)
        if not _is_converted(tensor):
            return kept
        # An embedding is looked up as the file has it; it is converted, too, where it is the output head as well.
        return q8_0_bytes(tensor) + (kept if tensor.name == EMBEDDING else 0)

    def new_kv(self, spec: KVSpec, n_blocks: int) -> CPUPages:
        return new_pages([spec], [n_blocks])[0]

    def new_kvs(self, specs: Sequence[KVSpec], n_blocks: Sequence[int]) -> list[KVPages]:
        return list(new_pages(specs, n_blocks))

    def execute(self, forward: Callable[[Batch], Buf], batch: Batch) -> npt.NDArray[np.float32]:
        with self._lock:
            tape = self._tape_for(forward, batch)
            self._run(tape, batch)
            return tape.output.copy()

    def execute_logits(
        self, forward: Callable[[Batch], Buf], batch: Batch
    ) -> tuple[npt.NDArray[np.float32], Sequence[tuple[float, int]]]:
        with self._lock:
            tape = self._tape_for(forward, batch, logits=True)
            self._run(tape, batch)
            return tape.output, [(value, int(i)) for value, i in tape.largest.tolist()]

    def _run(self, tape: Tape, batch: Batch) -> None:
        self._team.run(tape, batch)

    def begin(self, forward: Callable[[Batch], Buf], batch: Batch) -> CPUPass:
        with self._lock:
            begun = CPUPass(self._team, self._tape_for(forward, batch, apart=True), batch, self._pass_times)
            self._pass_times = begun.times
            return begun

    def close(self) -> None:
        self._team.close()
        self._tapes.clear()

    def _tape_for(
        self, forward: Callable[[Batch], Buf], batch: Batch, logits: bool = False, apart: bool = False
    ) -> Tape:
        """`logits`: look for the largest of each row, too. `apart`: in memory that no other run overwrites."""
        identity, alive = _identity(forward)
        shape = pass_shape_of(batch) if apart else shape_of(batch)
        key = identity, shape, logits, apart
        if key in self._tapes:
            self._tapes.move_to_end(key)
            return self._tapes[key]
        tape = self._record(forward, shape, logits, self._pass_arena if apart else self._arena)
        tape.keep(alive)
        self._tapes[key] = tape
        if len(self._tapes) > MAX_TAPES:
            self._tapes.popitem(last=False)
        return tape

    def _record(self, forward: Callable[[Batch], Buf], shape: Shape, logits: bool, arena: Arena) -> Tape:
        arena.restart()
        tape = self._recording = Tape(arena, shape)
        try:
            output = forward(tape.batch)
            largest = record_largest(tape, output) if logits else None
        except BaseException:
            tape.abandon()
            raise
        finally:
            self._recording = None
        self.library.load(tape.kernels, self.progress)
        tape.finish(output, self.library.address_or_zero, largest)
        return tape

    @property
    def _tape(self) -> Tape:
        if self._recording is None:
            raise RuntimeError("ops of the CPU backend run inside execute()")
        return self._recording

    # The ops: base.py says what each computes.
    def embed(self, table: CPUWeight, ids: npt.NDArray[np.int32]) -> Buf:
        return record_embed(self._tape, table.tensor, ids)

    def linear(self, x: Buf, weight: CPUWeight, bias: CPUWeight | None = None) -> Buf:
        tape, kind = self._tape, weight.rows.type.name
        out = tape.new(x.shape[0], weight.shape[0])
        if kind in FLOATS:
            record_float_matmul(tape, x, kind, weight.address, _values(bias), out)
        else:
            record_matmul(tape, x, weight.rows.type, weight.address, _values(bias), out)
        return out

    def rms_norm(self, x: Buf, weight: CPUWeight | None, eps: float) -> Buf:
        return record_norm(self._tape, x, _values(weight), None, eps, centre=False)

    def layer_norm(self, x: Buf, weight: CPUWeight | None, bias: CPUWeight | None, eps: float) -> Buf:
        return record_norm(self._tape, x, _values(weight), _values(bias), eps, centre=True)

    def rope(self, x: Buf, batch: Batch, spec: RopeSpec) -> Buf:
        return record_rope(self._tape, x, spec)

    def store_kv(self, kv: KVPages, k: Buf, v: Buf, batch: Batch) -> None:
        assert isinstance(kv, CPUPages)
        record_store(self._tape, kv, k, v)

    def attention(self, q: Buf, kv: KVPages, batch: Batch, spec: AttentionSpec) -> Buf:
        assert isinstance(kv, CPUPages)
        return record_attention(self._tape, q, kv, spec, _values(spec.sinks), self.threads)

    def activate(self, kind: str, gate: Buf, up: Buf | None = None) -> Buf:
        return record_activate(self._tape, kind, gate, up)

    def add(self, a: Buf, b: Buf, scale: float = 1.0) -> Buf:
        return record_add(self._tape, a, b, scale)

    def scale(self, x: Buf, factor: float, softcap: float = 0.0) -> Buf:
        return record_scale(self._tape, x, factor, softcap)

    def take(self, x: Buf, rows: npt.NDArray[np.int32]) -> Buf:
        return record_take(self._tape, x, rows)

    def route(self, scores: Buf, spec: RouteSpec, bias: CPUWeight | None = None) -> tuple[Buf, Buf]:
        return record_route(self._tape, scores, spec, _values(bias))

    def expert_linear(self, x: Buf, weight: CPUWeight, ids: Buf, bias: CPUWeight | None = None) -> Buf:
        return record_expert_linear(self._tape, x, weight.rows, ids, _values(bias))

    def head_linear(self, x: Buf, weight: CPUWeight) -> Buf:
        return record_head_linear(self._tape, x, weight.rows)

    def columns(self, x: Buf, start: int, stop: int) -> Buf:
        return record_columns(self._tape, x, start, stop)

    def concat(self, a: Buf, b: Buf) -> Buf:
        return record_concat(self._tape, a, b)

    def combine(self, x: Buf, weights: Buf) -> Buf:
        return record_combine(self._tape, x, weights)


def shape_of(batch: Batch) -> Shape:
    """The recording that a batch goes by: rows that take the same kernels share one, and growing sequences seldom need
    a new one."""
    return Shape(
        n_tokens=_row_room(batch.n_tokens),
        n_seqs=room(batch.n_seqs, 1),
        n_out=_row_room(max(1, len(batch.output_rows))),  # none: the same, less the last ops
        widths=tuple(room(table.shape[1], 512) for table in batch.block_tables),
        decode=batch.n_tokens == batch.n_seqs,
    )


def pass_shape_of(batch: Batch) -> Shape:
    """As `shape_of` for a pass beside running answers: few recordings, for they wait for each (20 to 30 ms)."""
    shape = shape_of(batch)
    return replace(shape, n_tokens=max(shape.n_tokens, PASS_ROWS), decode=False)


def _row_room(n: int) -> int:
    return room(n, panel_of(n, 256))  # blocks of 32 need fewer distinctions


def _identity(forward: Any) -> tuple[Any, list[Any]]:
    """What makes two forwards the same recording: the function and the objects bound to it. Returns a key and the
    objects whose ids are part of it, which the tape keeps alive."""
    alive: list[Any] = []

    def name(value: Any) -> Any:
        if isinstance(value, (int, float, str, bool, type(None))):
            return value
        if isinstance(value, (list, tuple)):
            return tuple(name(v) for v in value)
        if isinstance(value, types.MethodType):
            return name(value.__func__), name(value.__self__)
        if isinstance(value, partial):
            return name(value.func), name(value.args), tuple((k, name(v)) for k, v in sorted(value.keywords.items()))
        if isinstance(value, types.FunctionType):
            cells = [c.cell_contents for c in value.__closure__ or ()]
            return id(value.__code__), name(cells), name(value.__defaults__)
        alive.append(value)
        return id(value)

    key = name(forward)
    return key, [forward, *alive]
