"""Products of byte matrices in the tile registers of AMX machines.

A tile holds up to 16 rows of 64 bytes. An Op here takes its operands from memory and puts its result there, so that
no tile register lives outside it; only the registers' shapes do, from `tiles_on` to `tiles_off`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import lru_cache
from typing import Any

import numpy as np

from edgellm.backends.cpu.simd import ISA, Vector, host_features, op, view

__all__ = [
    "DEPTHS",
    "HAS_TILES",
    "ROWS",
    "load_four_in_all",
    "load_pair_in_all",
    "load_pair_in_half",
    "square_tiles_on",
    "tile_products",
    "tile_sums",
    "tiles_off",
    "tiles_on",
    "words_of_bytes",
]

ROWS = 16
"""Rows of a left operand and of a result."""
DEPTHS = (64, 32, 16)
"""Bytes of a left operand's row: each depth has tile registers of its shapes."""
_SYSCALL, _ASK, _TILE_DATA = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)


@lru_cache(maxsize=1)
def tiles_granted() -> bool:
    """Whether this process may use the tile registers: Linux wants to be asked, once for all threads."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not {"amx-tile", "amx-int8"} <= host_features():
        return False
    return int(ctypes.CDLL(None).syscall(_SYSCALL, _ASK, _TILE_DATA)) == 0


HAS_TILES = ISA == "avx512" and os.environ.get("EDGELLM_ISA") != "avx512" and tiles_granted()
"""Whether there are tile registers; EDGELLM_ISA=avx512 leaves them alone."""


def _shapes(lanes: int) -> bytes:
    """Palette 1: of each register (0 the result, then left and right of each depth) bytes a row, and rows."""
    shapes = [(4 * lanes, ROWS)] + [s for depth in DEPTHS for s in ((depth, ROWS), (4 * lanes, depth // 4))]
    widths = np.zeros(16, np.uint16)
    rows = np.zeros(16, np.uint8)
    for i, (width, count) in enumerate(shapes):
        widths[i], rows[i] = width, count
    return bytes([1]) + bytes(15) + widths.tobytes() + rows.tobytes()


def _configure(e: Any, spare: Any, shapes: bytes) -> None:
    for i, word in enumerate(np.frombuffer(shapes, np.int64)):
        e.store(e.b.add(spare, e.constant("i64", 8 * i)), e.constant("i64", int(word)))
    e.instructions("ldtilecfg ($0)", spare)


@op("void(i64, lit)")
def tiles_on(spare: int, lanes: int) -> None:
    """Give the tile registers their shapes for results of so many lanes, 8 or 16; `spare`: 64 bytes of memory."""


@tiles_on.emit()
def _emit_tiles_on(e: Any, spare: Any, lanes: int) -> None:
    _configure(e, spare, _shapes(lanes))


@op("void(i64)")
def square_tiles_on(spare: int) -> None:
    """Give all tile registers 16 rows of 64 bytes, for `tile_sums`; `spare`: 64 bytes of memory."""


@square_tiles_on.emit()
def _emit_square_tiles_on(e: Any, spare: Any) -> None:
    shapes = np.zeros(64, np.uint8)
    shapes[0], shapes[16:32:2], shapes[48:56] = 1, 64, ROWS
    _configure(e, spare, shapes.tobytes())


@op("void()", lambda e: e.instructions("tilerelease"))
def tiles_off() -> None:
    """Leave the tile registers; until then every change of threads must save them."""


@op("void(i64, i64, i64, i64, lit, lit)")
def tile_products(left: int, stride: int, right: int, result: int, depth: int, lanes: int) -> None:
    """result (16, lanes) int32 = left (16 rows of `depth` int8, `stride` bytes apart) times right (depth, lanes) int8,
    which lies as [depth / 4][lanes][4]."""
    a = np.stack([view(left + i * stride, np.int8, depth) for i in range(ROWS)]).astype(np.int32)
    b = view(right, np.int8, lanes * depth).reshape(-1, lanes, 4).astype(np.int32)
    view(result, np.int32, ROWS * lanes)[:] = np.einsum("rkj,knj->rn", a.reshape(ROWS, -1, 4), b).reshape(-1)


@tile_products.emit()
def _emit_tile_products(e: Any, left: Any, stride: Any, right: Any, result: Any, depth: int, lanes: int) -> None:
    a, b = 2 * DEPTHS.index(depth) + 1, 2 * DEPTHS.index(depth) + 2
    e.instructions(
        f"tilezero %tmm0; tileloadd ($0,$1,1), %tmm{a}; tileloadd ($2,$3,1), %tmm{b}; "
        f"tdpbssd %tmm{b}, %tmm{a}, %tmm0; tilestored %tmm0, ($4,$3,1)",
        *(left, stride, right, e.constant("i64", 4 * lanes), result),
    )


@op("void(i64, i64, i64, lit)")
def tile_sums(left: int, right: int, result: int, count: int) -> None:
    """result (count, 16, 16) int32 = left (16, 256) int8 times each of `count` (at most 4) rights (256, 16) int8, which
    lie as [64][16][4], one after the other."""
    a = view(left, np.int8, ROWS * 256).reshape(ROWS, 64, 4).astype(np.int32)
    b = view(right, np.int8, count * 256 * 16).reshape(count, 64, 16, 4).astype(np.int32)
    view(result, np.int32, count * 256)[:] = np.einsum("rkj,cknj->crn", a, b).reshape(-1)


@tile_sums.emit()
def _emit_tile_sums(e: Any, left: Any, right: Any, result: Any, count: int) -> None:
    lines = [f"tilezero %tmm{c}" for c in range(count)]
    for s in range(4):
        lines.append(f"tileloadd {64 * s}($0,$1,1), %tmm4")
        for c in range(count):
            lines.append(f"tileloadd {4096 * c + 1024 * s}($2,$3,1), %tmm{5 + c % 2}")
            lines.append(f"tdpbssd %tmm{5 + c % 2}, %tmm4, %tmm{c}")
    lines += [f"tilestored %tmm{c}, {1024 * c}($4,$3,1)" for c in range(count)]
    e.instructions("; ".join(lines), left, e.constant("i64", 256), right, e.constant("i64", 64), result)


@op("i32x16(i64)", lambda e, a: e.bitcast(e.splat(e.load(a, "i64"), 8), "i32x16"))
def load_pair_in_all(address: int) -> Vector:
    """Two int32 from an address, eight times."""
    return np.tile(view(address, np.int32, 2), 8)


@op("i32x16(i64)")
def load_four_in_all(address: int) -> Vector:
    """Four int32 from an address, four times."""
    return np.tile(view(address, np.int32, 4), 4)


@load_four_in_all.emit()
def _emit_load_four_in_all(e: Any, address: Any) -> Any:
    x = e.load(address, "i32x4")
    return e.shuffle(x, x, [0, 1, 2, 3] * 4)


@op("i32x16(i64, i64)")
def load_pair_in_half(a: int, b: int) -> Vector:
    """Two int32 from one address, four times, then two from another."""
    return np.concatenate([np.tile(view(p, np.int32, 2), 4) for p in (a, b)])


@load_pair_in_half.emit()
def _emit_load_pair_in_half(e: Any, a: Any, b: Any) -> Any:
    pairs = [e.splat(e.load(p, "i64"), 8) for p in (a, b)]
    return e.bitcast(e.shuffle(*pairs, [0, 1, 2, 3, 12, 13, 14, 15]), "i32x16")


@op("i32x16(i8x16)", lambda e, x: e.extend(x, "i32x16", signed=True))
def words_of_bytes(x: Vector) -> Vector:
    """Signed bytes as int32."""
    return x.astype(np.int32)
