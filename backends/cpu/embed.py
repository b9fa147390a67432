"""Embedding rows straight from the (quantised) table: one op on the tape; the table itself is never expanded.

Types without a kernel are dequantised in numpy before the tape runs (`backends/dequant.py`, which defines them all).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import Batch
from edgellm.backends.cpu.arena import Buf
from edgellm.backends.cpu.block_floats import WRITERS
from edgellm.backends.cpu.jit import Inline, Kernel, inline, kernel
from edgellm.backends.cpu.matmul_float import FORMATS
from edgellm.backends.cpu.simd import load_i32, store
from edgellm.backends.cpu.tape import Tape
from edgellm.backends.cpu.vecmath import arg, store_part
from edgellm.backends.dequant import dequantise
from edgellm.quants import QUANT_TABLE, GGMLType, QTensor

__all__ = ["KERNELS", "record_embed"]


def _block_row(kind: str) -> Inline:
    info, write = QUANT_TABLE[GGMLType[kind]], WRITERS[kind]
    block, type_size = info.block_size, info.type_size

    def row(source: int, d: int, out: int, spare: int) -> None:
        for b in range(d // block):
            write(source + type_size * b, out + 4 * block * b)

    return inline(row)


def _float_row(kind: str) -> Inline:
    item, load, part = FORMATS[kind]

    def row(source: int, d: int, out: int, spare: int) -> None:
        whole, rest = d // 8 * 8, d % 8
        for i in range(0, whole, 8):
            store(out + 4 * i, load(source + item * i))
        if rest != 0:
            store_part(out + 4 * whole, part(source + item * whole, rest, spare), rest, spare)

    return inline(row)


def _embed(kind: str) -> Kernel:
    """args: table, bytes of one of its rows, ids (int32), out, d; a unit is one row of out."""
    row = _float_row(kind) if kind in FORMATS else _block_row(kind)

    def embed(args: int, begin: int, end: int, scratch: int) -> None:
        d = arg(args, 4)
        for i in range(begin, end):
            source = arg(args, 0) + arg(args, 1) * load_i32(arg(args, 2) + 4 * i)
            row(source, d, arg(args, 3) + 4 * d * i, scratch)

    return kernel(embed, f"embed_{kind.lower()}")


KERNELS = {kind: _embed(kind) for kind in (*FORMATS, *WRITERS)}


def record_embed(tape: Tape, table: QTensor, ids: npt.NDArray[np.int32]) -> Buf:
    """Rows of a (vocab, dim) table: (n_tokens, dim). `ids`: contiguous, each below vocab."""
    count, d = tape.count(ids), table.shape[1]
    if table.type.name not in KERNELS:
        return _by_numpy(tape, table, ids, count)
    out = tape.new(count, d)
    args = (table.data, table.data.shape[1], ids, out, d)
    # Of all activations a unit touches only its own row of `out`, so what reads that row can follow it.
    tape.op(KERNELS[table.type.name], count, args, writes=[out], step=0, scratch=64, grain=(out, d))
    return out


def _by_numpy(tape: Tape, table: QTensor, ids: npt.NDArray[np.int32], count: int) -> Buf:
    out: npt.NDArray[Any] = np.zeros((count, table.shape[1]), np.float32)

    def fill(batch: Batch) -> None:
        n = tape.loaded(count)
        out[:n] = dequantise(table.data[ids[:n]], table.type).reshape(n, -1)

    tape.replay.append(fill)
    return tape.external(out, count, table.shape[1])
