"""The paged KV cache: layout, and writing a step's rows into it.

A block holds BLOCK_SIZE positions of all kv heads of one layer. Per head, K then V, each padded to a cache line:
- K is dimension-major, [k_dim][BLOCK_SIZE]: the lanes of a vector are positions, so q.k needs no sum over lanes;
- V is position-major, [BLOCK_SIZE][v_dim]: the lanes are dimensions.
Elements are float32, float16, or (q8_0) int8 with one float16 scale per position and 32 dimensions; the scales follow
the elements: K's as [groups][BLOCK_SIZE], V's as [BLOCK_SIZE][groups].
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import Batch, KVPages, KVSpec
from edgellm.backends.cpu.arena import Buf
from edgellm.backends.cpu.jit import Kernel, kernel
from edgellm.backends.cpu.simd import (
    absolute,
    load_f32,
    load_f32x8,
    load_i8,
    load_i16,
    load_i64,
    max_f32x8,
    maximum,
    mul,
    splat_f32x8,
    store,
    store_f16x8,
    store_f32,
    store_i8,
    store_i16,
)
from edgellm.backends.cpu.tape import Tape
from edgellm.backends.cpu.vecmath import ONE, ZERO, arg, load_part, round_away8
from edgellm.config import BLOCK_SIZE
from edgellm.errors import RequestError

__all__ = ["GROUP", "CPUPages", "KVLayout", "new_pages", "record_store"]

GROUP = 32
LINE = 64
FEW_ROWS = 16
ITEM = {"f32": 4, "f16": 2, "q8_0": 1}


class KVLayout:
    """Byte offsets inside a block for one KVSpec."""

    def __init__(self, spec: KVSpec):
        if spec.kv_type not in ITEM:
            raise RequestError(f"kv_type must be f32, f16 or q8_0, not {spec.kv_type!r}")
        if spec.block_size != BLOCK_SIZE:
            raise RequestError(f"the CPU backend's KV blocks hold {BLOCK_SIZE} positions, not {spec.block_size}")
        self.item = ITEM[spec.kv_type]
        quantised = spec.kv_type == "q8_0"
        groups = (-(-spec.k_dim // GROUP), -(-spec.v_dim // GROUP)) if quantised else (0, 0)
        self.k_scales = BLOCK_SIZE * spec.k_dim * self.item
        k_bytes = _lines(self.k_scales + 2 * BLOCK_SIZE * groups[0])
        self.v = k_bytes
        self.v_scales = k_bytes + BLOCK_SIZE * spec.v_dim * self.item
        self.head = _lines(self.v_scales + 2 * BLOCK_SIZE * groups[1])
        self.block = self.head * spec.n_kv_heads


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _small_pages(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeros that take memory in the system's small pages, as they are written."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class CPUPages(KVPages):
    """One layer's blocks in memory of their own, or among those of other layers: block b starts at `address` + b *
    `stride`. Memory is taken as blocks are written."""

    def __init__(self, spec: KVSpec, n_blocks: int, memory: npt.NDArray[np.uint8], offset: int, stride: int):
        self.spec, self.n_blocks, self.stride = spec, n_blocks, stride
        self.layout = KVLayout(spec)
        self.blocks: npt.NDArray[np.uint8] = memory[: n_blocks * stride].reshape(n_blocks, stride)
        self.blocks = self.blocks[:, offset : offset + self.layout.block]
        self.address = int(self.blocks.ctypes.data)
        """Where block 0 starts."""
        self.span = self.address, n_blocks * stride - offset
        """All of its memory, and what lies between."""

    def read_block(self, block: int) -> bytes:
        return bytes(self.blocks[block])

    def write_block(self, block: int, data: bytes) -> None:
        if len(data) != self.layout.block:
            raise ValueError(f"a block of this cache has {self.layout.block} bytes, not {len(data)}")
        self.blocks[block] = np.frombuffer(data, np.uint8)

    def copy_block(self, source: int, target: int) -> None:
        self.blocks[target] = self.blocks[source]

    def touch_block(self, block: int) -> None:
        self.blocks[block, :: mmap.PAGESIZE] |= 0


def new_pages(specs: Sequence[KVSpec], n_blocks: Sequence[int]) -> list[CPUPages]:
    """Zero pages for some layers. The layers of a group lie side by side, block by block: a huge page then holds a few
    tokens of all layers, so that one is taken now and then (2 to 3 ms in a virtual machine) instead of one for every
    layer in the same step. Windows lie apart in small pages: 2 MB would be more than many of them take."""
    together: dict[Any, list[int]] = {}
    for i, (spec, n) in enumerate(zip(specs, n_blocks, strict=True)):
        together.setdefault((spec.group, n, i if spec.window else None), []).append(i)
    pages: dict[int, CPUPages] = {}
    for members in together.values():
        sizes = [KVLayout(specs[i]).block for i in members]
        n, stride = n_blocks[members[0]], sum(sizes)
        # One line more: the last V row may be read past its end by less than a vector.
        size = n * stride + 2 * LINE
        # numpy asks for huge pages from 4 MB on: decoding deep in a context is 15 to 30% faster with them.
        memory = _small_pages(size) if specs[members[0]].window else np.zeros(size, np.uint8)
        memory = memory[-memory.ctypes.data % LINE :]
        for i, offset in zip(members, accumulate(sizes, initial=0), strict=False):
            pages[i] = CPUPages(specs[i], n, memory, offset, stride)
    return [pages[i] for i in range(len(specs))]


def _store_plain(kv_type: str) -> Kernel:
    """args: k, v, slots (int64 per token), pages, n_kv_heads, k_dim, v_dim, bytes from block to block,
    head bytes, V offset."""

    def write(args: int, begin: int, end: int, scratch: int) -> None:
        heads, k_dim, v_dim = arg(args, 4), arg(args, 5), arg(args, 6)
        for unit in range(begin, end):
            slot = load_i64(arg(args, 2) + 8 * (unit // heads))
            base = arg(args, 3) + slot // BLOCK_SIZE * arg(args, 7) + unit % heads * arg(args, 8)
            position = slot % BLOCK_SIZE
            k, v = arg(args, 0) + 4 * k_dim * unit, arg(args, 1) + 4 * v_dim * unit
            if kv_type == "f32":
                row = base + arg(args, 9) + 4 * v_dim * position
                for d in range(k_dim):
                    store_f32(base + 4 * (BLOCK_SIZE * d + position), load_f32(k + 4 * d))
                for d in range(v_dim):
                    store_f32(row + 4 * d, load_f32(v + 4 * d))
            else:
                row = base + arg(args, 9) + 2 * v_dim * position
                for d in range(0, k_dim, 8):
                    part = load_part(k + 4 * d, min(8, k_dim - d), scratch + 32)
                    store_f16x8(scratch, part)
                    for i in range(min(8, k_dim - d)):
                        store_i16(base + 2 * (BLOCK_SIZE * (d + i) + position), load_i16(scratch + 2 * i))
                for d in range(0, v_dim // 8 * 8, 8):
                    store_f16x8(row + 2 * d, load_f32x8(v + 4 * d))
                rest = v_dim % 8
                if rest != 0:
                    store_f16x8(scratch, load_part(v + 4 * (v_dim - rest), rest, scratch + 32))
                    for i in range(rest):
                        store_i16(row + 2 * (v_dim - rest + i), load_i16(scratch + 2 * i))

    return kernel(write, f"store_kv_{kv_type}")


@kernel
def store_kv_q8_0(args: int, begin: int, end: int, scratch: int) -> None:
    """args as for the plain types, then K scales offset, V scales offset. d = max|x| / 127, q = x / d rounded half
    away from zero, as ggml's q8_0."""
    heads = arg(args, 4)
    for unit in range(begin, end):
        slot = load_i64(arg(args, 2) + 8 * (unit // heads))
        base = arg(args, 3) + slot // BLOCK_SIZE * arg(args, 7) + unit % heads * arg(args, 8)
        position = slot % BLOCK_SIZE
        for half in range(2):  # K, then V
            dim = arg(args, 5 + half)
            x = arg(args, half) + 4 * dim * unit
            groups = (dim + GROUP - 1) // GROUP
            for g in range(groups):
                count = min(GROUP, dim - g * GROUP)
                for i in range(0, GROUP, 8):
                    n = min(max(count - i, 0), 8)
                    store(scratch + 4 * i, load_part(x + 4 * (g * GROUP + i), n, scratch + 256))
                largest = absolute(load_f32x8(scratch))
                for i in range(8, GROUP, 8):
                    largest = maximum(largest, absolute(load_f32x8(scratch + 4 * i)))
                d = max_f32x8(largest) / np.float32(127)
                inverse = ONE / d if d > ZERO else ZERO
                store_f16x8(scratch + 128, splat_f32x8(d))
                at = arg(args, 10) + 2 * (BLOCK_SIZE * g + position)
                if half == 1:
                    at = arg(args, 11) + 2 * (groups * position + g)
                store_i16(base + at, load_i16(scratch + 128))
                for i in range(0, GROUP, 8):
                    q = round_away8(mul(load_f32x8(scratch + 4 * i), splat_f32x8(inverse)))
                    store(scratch + 4 * i, q)
                for i in range(count):
                    index = g * GROUP + i
                    at = BLOCK_SIZE * index + position
                    if half == 1:
                        at = arg(args, 9) + dim * position + index
                    store_i8(base + at, load_i8(scratch + 4 * i))


STORES = {"f32": _store_plain("f32"), "f16": _store_plain("f16"), "q8_0": store_kv_q8_0}


def slots_of(tape: Tape, group: int) -> npt.NDArray[np.int64]:
    """Per token, block * BLOCK_SIZE + offset in the block; filled before every run, shared by a group's layers."""
    key = ("slots", group)
    if key not in tape.shared:
        slots, every = np.zeros(tape.n_tokens, np.int64), np.arange(tape.shape.n_seqs)

        def fill(batch: Batch) -> None:
            table = batch.block_tables[group]
            # Few: numpy's indexing takes 0.1 ms where weights have driven it out of the caches.
            if batch.n_tokens <= FEW_ROWS:
                starts, positions = batch.seq_starts.tolist(), batch.positions.tolist()
                for s in range(batch.n_seqs):
                    for i in range(starts[s], starts[s + 1]):
                        block, offset = divmod(positions[i], BLOCK_SIZE)
                        slots[i] = table.item(s, block) * BLOCK_SIZE + offset
                return
            sequence = every[: batch.n_seqs]
            if not tape.shape.decode:
                sequence = np.repeat(sequence, np.diff(batch.seq_starts))
            blocks = table[sequence, batch.positions // BLOCK_SIZE]
            slots[: batch.n_tokens] = blocks.astype(np.int64) * BLOCK_SIZE + batch.positions % BLOCK_SIZE

        tape.replay.append(fill)
        tape.shared[key] = slots
    result: npt.NDArray[np.int64] = tape.shared[key]
    return result


def record_store(tape: Tape, pages: CPUPages, k: Buf, v: Buf) -> None:
    """Write k (n_tokens, n_kv_heads, k_dim) and v into their blocks. A unit is one head of one token."""
    spec, layout = pages.spec, pages.layout
    slots = slots_of(tape, spec.group)
    sizes = (spec.n_kv_heads, spec.k_dim, spec.v_dim, pages.stride, layout.head, layout.v)
    args = (k, v, slots, pages.address, *sizes, layout.k_scales, layout.v_scales)
    units = tape.n_tokens * spec.n_kv_heads
    grain = (k, spec.k_dim)
    tape.op(STORES[spec.kv_type], units, args, reads=[k, v], writes=[pages.span], step=0, scratch=512, grain=grain)
    tape.stored()
