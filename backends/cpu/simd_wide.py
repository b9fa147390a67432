"""Vectors of the machine's own width, for kernels that keep one weight row per lane.

`LANES` is that width in 32-bit lanes: 16 with AVX-512, else 8. `INTS` has one int32 a row, `FLOATS` one float32,
`PAIRS` two int16 and `BYTES` four bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.backends.cpu.simd import (
    DTYPES,
    ISA,
    Op,
    Vector,
    op,
    reinterpret,
    split_type,
    view,
)

LANES = 16 if ISA == "avx512" else 8
HAS_DOT = ISA in ("avx512", "neon")
"""Whether one instruction adds four byte products to an int32 lane (vpdpbusd, sdot)."""
WIDE_OFFSET = 128 if ISA == "avx512" else 0
"""What tiles of signed bytes are stored plus: vpdpbusd wants its weights unsigned."""

BYTES, PAIRS = f"i8x{4 * LANES}", f"i16x{2 * LANES}"
INTS, FLOATS = f"i32x{LANES}", f"f32x{LANES}"


def _load(name: str, kind: str) -> Op:
    element, count = split_type(kind)

    def twin(address: int) -> Vector:
        return view(address, DTYPES[element], count).copy()

    twin.__name__ = name
    return op(f"{kind}(i64)", lambda e, a: e.load(a, kind))(twin)


load_bytes = _load("load_bytes", BYTES)
load_pairs = _load("load_pairs", PAIRS)
load_ints = _load("load_ints", INTS)
load_floats = _load("load_floats", FLOATS)


def _splat(name: str, kind: str) -> Op:
    element, count = split_type(kind)

    def twin(x: Any) -> Vector:
        return np.full(count, x if element == "f32" else np.array(int(x)).astype(DTYPES[element]), DTYPES[element])

    twin.__name__ = name
    scalar = "f32" if element == "f32" else "i64"
    return op(f"{kind}({scalar})", lambda e, x: e.splat(x if element == "f32" else e.truncate(x, element), count))(twin)


splat_ints = _splat("splat_ints", INTS)
splat_floats = _splat("splat_floats", FLOATS)
splat_bytes = _splat("splat_bytes", BYTES)


def _broadcast(name: str, kind: str) -> Op:
    element, count = split_type(kind)
    word = "f32" if element == "f32" else "i32"
    lanes = count if word == "f32" else LANES

    def twin(address: int) -> Vector:
        return np.tile(view(address, np.uint8, 4), LANES).view(DTYPES[element])

    twin.__name__ = name
    return op(f"{kind}(i64)", lambda e, a: e.bitcast(e.splat(e.load(a, word), lanes), kind))(twin)


broadcast_bytes = _broadcast("broadcast_bytes", BYTES)
broadcast_pairs = _broadcast("broadcast_pairs", PAIRS)
broadcast_ints = _broadcast("broadcast_ints", INTS)
broadcast_floats = _broadcast("broadcast_floats", FLOATS)

ints_as_bytes = reinterpret(INTS, BYTES)
ints_as_pairs = reinterpret(INTS, PAIRS)


@op(f"{FLOATS}({INTS})", lambda e, x: e.float_of_int(x, FLOATS))
def ints_to_floats(x: Vector) -> Vector:
    """Signed integers as float32."""
    return x.astype(np.float32)


@op(f"{FLOATS}({INTS})", lambda e, x: e.half_to_float(e.truncate(x, f"i16x{LANES}"), LANES))
def low_halves_to_floats(x: Vector) -> Vector:
    """The float16 in each lane's low 16 bits, as float32."""
    return np.ascontiguousarray(x.view(np.float16)[0::2]).astype(np.float32)


@op(f"{INTS}({INTS}, lit)", lambda e, a, n: e.shift("ashr", a, n))
def shift_right_signed(a: Vector, n: int) -> Vector:
    """Each lane moved right by n bits, its sign coming in."""
    return a >> a.dtype.type(n)
