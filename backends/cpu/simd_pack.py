"""Ops that take packed weights apart: nibbles and bits, scales that lie apart, code tables, transposes, lane sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.backends.cpu.jit import inline
from edgellm.backends.cpu.simd import (
    ISA,
    Op,
    Vector,
    add,
    load_i32x8,
    op,
    permute,
    permute2,
    registers,
    store,
    unroll,
    view,
)
from edgellm.backends.cpu.simd_wide import FLOATS, INTS, LANES


# Small vectors and lanes.
@op("V(V, lit)")
def shifted(x: Vector, n: int) -> Vector:
    """Lanes moved left by n bits (right by -n, zeros coming in). Bytes move within int16: mask what comes across."""
    lanes = x.view(np.uint16) if x.dtype.itemsize == 1 else x.view(f"u{x.dtype.itemsize}")
    moved = lanes << lanes.dtype.type(n) if n >= 0 else lanes >> lanes.dtype.type(-n)
    return moved.view(x.dtype)


@shifted.emit()
def _emit_shifted(e: Any, x: Any, n: int) -> Any:
    kind = x.type
    if kind.element.width == 8:
        x = e.bitcast(x, f"i16x{kind.count // 2}")
    return e.b.bitcast(e.shift("shl", x, n) if n >= 0 else e.shift("lshr", x, -n), kind)


low_f32x8, high_f32x8 = permute("f32x8", [0, 1, 2, 3]), permute("f32x8", [4, 5, 6, 7])


@op("f32(f32x8)", lambda e, x: e.lane(x, 0))
def first_lane_f32x8(x: Vector) -> np.float32:
    """Lane 0."""
    return np.float32(x[0])


@op("i8x32(i64)")
def load_nibbles(address: int) -> Vector:
    """16 bytes from memory: their low nibbles, then their high nibbles."""
    packed = view(address, np.uint8, 16)
    return np.concatenate([packed & 15, packed >> 4]).view(np.int8)


@load_nibbles.emit()
def _emit_load_nibbles(e: Any, address: Any) -> Any:
    packed = e.load(address, "i8x16")
    high = e.bitcast(e.shift("lshr", e.bitcast(packed, "i16x8"), 4), "i8x16")
    return e.b.and_(e.shuffle(packed, high, list(range(32))), e.constant("i8x32", 15))


@op("f32x8(i64, i64, i64, i64)")
def load_f16_pairs_of_four(a: int, b: int, c: int, d: int) -> Vector:
    """Pairs of float16 at four addresses: the four first ones, then the four second ones."""
    pairs = np.array([view(p, np.float16, 2) for p in (a, b, c, d)])
    return pairs.T.reshape(-1).astype(np.float32)


@load_f16_pairs_of_four.emit()
def _emit_load_f16_pairs_of_four(e: Any, *addresses: Any) -> Any:
    words = e.constant("i32x4", 0)
    for i, address in enumerate(addresses):
        words = e.b.insert_element(words, e.load(address, "i32"), e.constant("i32", i))
    halves = e.bitcast(words, "i16x8")
    return e.half_to_float(e.shuffle(halves, halves, [0, 2, 4, 6, 1, 3, 5, 7]), 8)


@op("f32x4(i64, i64, i64, i64)")
def load_f16_of_four(a: int, b: int, c: int, d: int) -> Vector:
    """The float16 at each of four addresses."""
    return np.array([view(p, np.float16, 1)[0] for p in (a, b, c, d)], np.float32)


@load_f16_of_four.emit()
def _emit_load_f16_of_four(e: Any, *addresses: Any) -> Any:
    halves = e.constant("i16x4", 0)
    for i, address in enumerate(addresses):
        halves = e.b.insert_element(halves, e.load(address, "i16"), e.constant("i32", i))
    return e.half_to_float(halves, 4)


@op(f"{FLOATS}({INTS})")
def exponents_to_floats(x: Vector) -> Vector:
    """Exponents e in 0..255 as 2^(e - 128)."""
    return np.exp2(x.astype(np.float64) - 128).astype(np.float32)


@exponents_to_floats.emit()
def _emit_exponents_to_floats(e: Any, x: Any) -> Any:
    normal = e.b.shl(e.b.sub(x, e.constant(INTS, 1)), e.constant(INTS, 23))
    tiny = e.b.shl(e.constant(INTS, 0x00200000), x)
    return e.bitcast(e.b.select(e.b.icmp_unsigned("<", x, e.constant(INTS, 2)), tiny, normal), FLOATS)


@op(f"{INTS}({INTS}, i64)", lambda e, x, n: e.b.lshr(x, e.splat(e.truncate(n, "i32"), LANES)))
def shifted_down(x: Vector, n: int) -> Vector:
    """Lanes moved right by n bits, which need not be a constant; zeros coming in."""
    return (x.view(np.uint32) >> np.uint32(n)).view(np.int32)


@op(f"{INTS}({INTS}, {INTS}, lit)")
def funnel(low: Vector, high: Vector, n: int) -> Vector:
    """Bytes n .. n + 3 of the eight in (low, high), n in 0..4."""
    both = low.view(np.uint32).astype(np.uint64) | (high.view(np.uint32).astype(np.uint64) << np.uint64(32))
    return (both >> np.uint64(8 * n)).astype(np.uint32).view(np.int32)


@funnel.emit()
def _emit_funnel(e: Any, low: Any, high: Any, n: int) -> Any:
    if n in (0, 4):
        return high if n else low
    return e.b.or_(e.shift("lshr", low, 8 * n), e.shift("shl", high, 32 - 8 * n))


@op("i8x16(i64, i64)")
def i8x16_of(low: int, high: int) -> Vector:
    """The bytes of two int64."""
    return np.array([low, high], np.int64).view(np.int8)


@i8x16_of.emit()
def _emit_i8x16_of(e: Any, low: Any, high: Any) -> Any:
    pair = e.b.insert_element(e.constant("i64x2", 0), low, e.constant("i32", 0))
    return e.bitcast(e.b.insert_element(pair, high, e.constant("i32", 1)), "i8x16")


@op("i16x8(i64)", lambda e, x: e.extend(e.bitcast(x, "i8x8"), "i16x8", signed=False))
def i16x8_of_bytes(x: int) -> Vector:
    """The eight bytes of an int64, each as int16."""
    return np.array([int(x)], np.int64).view(np.uint8).astype(np.int16)


@op("i64(i32x8, lit)", lambda e, x, i: e.extend(e.lane(x, i), "i64", signed=True))
def lane_i32x8(x: Vector, i: int) -> int:
    """One lane."""
    return int(x[i])


TABLES = {
    "iq4": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    "mxfp4": [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
}
"""Values of four-bit codes: the non-linear quants' table; E2M1 doubled."""


def lookup(name: str, lanes: int, plus: int) -> Op:
    """An Op from codes 0..15 (`lanes` bytes) to the table's value plus `plus`."""
    values = np.array(TABLES[name]) + plus
    kind = f"i8x{lanes}"

    def twin(codes: Vector) -> Vector:
        return values[codes.view(np.uint8)].astype(np.uint8).view(np.int8)

    twin.__name__ = f"lookup_{name}_{lanes}_{plus}"

    def emit(e: Any, codes: Any) -> Any:
        import llvmlite.ir as ir

        def table(count: int) -> Any:
            return ir.Constant(ir.VectorType(ir.IntType(8), count), [int(v) % 256 for v in values] * (count // 16))

        if ISA in ("avx2", "avx512"):
            instruction = "llvm.x86.avx512.pshuf.b.512" if lanes == 64 else "llvm.x86.avx2.pshuf.b"
            return e.call(instruction, kind, table(lanes), codes)
        if ISA == "neon":
            low, high = list(range(16)), list(range(16, 32))
            parts = [e.shuffle(codes, codes, part) for part in (low, high)]
            found = [e.call("llvm.aarch64.neon.tbl1.v16i8", "i8x16", table(16), part) for part in parts]
            return e.shuffle(found[0], found[1], low + high)
        out = codes
        for i in range(lanes):
            where = e.extend(e.lane(codes, i), "i32", signed=False)
            out = e.b.insert_element(out, e.b.extract_element(table(16), where), e.constant("i32", i))
        return out

    return op(f"{kind}({kind})", emit)(twin)


# Transposes: eight rows of 32-bit words become words of eight rows.
_zip_low, _zip_high = (
    permute2("i32x8", [0, 8, 1, 9, 4, 12, 5, 13]),
    permute2("i32x8", [2, 10, 3, 11, 6, 14, 7, 15]),
)
_zip_low2, _zip_high2 = (
    permute2("i32x8", [0, 1, 8, 9, 4, 5, 12, 13]),
    permute2("i32x8", [2, 3, 10, 11, 6, 7, 14, 15]),
)
_lows, _highs = permute2("i32x8", [0, 1, 2, 3, 8, 9, 10, 11]), permute2("i32x8", [4, 5, 6, 7, 12, 13, 14, 15])


@inline
def transposed_8x8(source: int, stride: int) -> tuple[Vector, ...]:
    """32 bytes of each of eight rows, `stride` bytes apart -> eight vectors of one word a row."""
    a = registers(8)
    b = registers(8)
    for r in unroll(8):
        a[r] = load_i32x8(source + r * stride)
    for r in unroll(4):
        b[2 * r] = _zip_low(a[2 * r], a[2 * r + 1])
        b[2 * r + 1] = _zip_high(a[2 * r], a[2 * r + 1])
    for h in unroll(2):
        for i in unroll(2):
            a[4 * h + 2 * i] = _zip_low2(b[4 * h + i], b[4 * h + i + 2])
            a[4 * h + 2 * i + 1] = _zip_high2(b[4 * h + i], b[4 * h + i + 2])
    for i in unroll(4):
        b[i] = _lows(a[i], a[i + 4])
        b[i + 4] = _highs(a[i], a[i + 4])
    return b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]


@inline
def transpose_8x8(source: int, stride: int, target: int, target_stride: int) -> None:
    """The same, the vectors stored `target_stride` bytes apart."""
    c = registers(8)
    c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7] = transposed_8x8(source, stride)
    for i in unroll(8):
        store(target + i * target_stride, c[i])


@op(f"{INTS}(i64, i64)")
def load_rows_of_four(address: int, stride: int) -> Vector:
    """16 bytes of each of LANES / 4 rows, `stride` bytes apart."""
    return np.concatenate([view(address + r * stride, np.int32, 4) for r in range(LANES // 4)])


@load_rows_of_four.emit()
def _emit_load_rows_of_four(e: Any, address: Any, stride: Any) -> Any:
    parts = []
    for _ in range(LANES // 4):
        parts.append(e.load(address, "i32x4"))
        address = e.b.add(address, stride)
    while len(parts) > 1:
        both = list(range(2 * parts[0].type.count))
        parts = [e.shuffle(parts[i], parts[i + 1], both) for i in range(0, len(parts), 2)]
    return parts[0]


def _zip(pairs: list[tuple[int, int]]) -> Op:
    """In each 128 bits: lanes of the first (0) and the second (1) vector."""
    return permute2(INTS, [LANES * which + quarter + i for quarter in range(0, LANES, 4) for which, i in pairs])


zip_low, zip_high = _zip([(0, 0), (1, 0), (0, 1), (1, 1)]), _zip([(0, 2), (1, 2), (0, 3), (1, 3)])
zip_low_pairs, zip_high_pairs = _zip([(0, 0), (0, 1), (1, 0), (1, 1)]), _zip([(0, 2), (0, 3), (1, 2), (1, 3)])
_even_parts = permute2("i32x16", [4 * part + i for part in (0, 2, 4, 6) for i in range(4)])
_odd_parts = permute2("i32x16", [4 * part + i for part in (1, 3, 5, 7) for i in range(4)])


@op("i32x16(i64, i64)")
def load_two_of_eight(address: int, apart: int) -> Vector:
    """32 bytes at an address, and 32 that lie `apart` bytes further."""
    return np.concatenate([view(address, np.int32, 8), view(address + apart, np.int32, 8)])


@load_two_of_eight.emit()
def _emit_load_two_of_eight(e: Any, address: Any, apart: Any) -> Any:
    return e.shuffle(e.load(address, "i32x8"), e.load(e.b.add(address, apart), "i32x8"), list(range(16)))


@inline
def four_words_of_rows(source: int, stride: int) -> tuple[Vector, ...]:
    """16 bytes of each of LANES rows, `stride` bytes apart -> four vectors INTS of one word a row."""
    v = registers(4)
    u = registers(4)
    for j in unroll(4):
        v[j] = load_rows_of_four(source + j * stride, 4 * stride)
    for j in unroll(2):
        u[j], u[2 + j] = zip_low(v[2 * j], v[2 * j + 1]), zip_high(v[2 * j], v[2 * j + 1])
    for j in unroll(2):
        v[2 * j], v[2 * j + 1] = zip_low_pairs(u[2 * j], u[2 * j + 1]), zip_high_pairs(u[2 * j], u[2 * j + 1])
    return tuple(v)


@inline
def eight_words_of_rows(source: int, stride: int) -> tuple[Vector, ...]:
    """The same of 32 bytes: eight vectors. No store in between: loads would wait for narrower stores."""
    if LANES == 8:
        return transposed_8x8(source, stride)
    else:
        v = registers(8)
        u = registers(4)
        for h in unroll(2):
            for r in unroll(4):
                v[4 * h + r] = load_two_of_eight(source + (8 * h + r) * stride, 4 * stride)
            for j in unroll(2):
                a, b = v[4 * h + 2 * j], v[4 * h + 2 * j + 1]
                u[j], u[2 + j] = zip_low(a, b), zip_high(a, b)
            for j in unroll(2):
                v[4 * h + 2 * j] = zip_low_pairs(u[2 * j], u[2 * j + 1])
                v[4 * h + 2 * j + 1] = zip_high_pairs(u[2 * j], u[2 * j + 1])
        # Parts of v[i], of 128 bits: word i of rows 0..3, word 4 + i of them; the same of rows 4..7.
        for i in unroll(4):
            a, b = v[i], v[4 + i]
            v[i], v[4 + i] = _even_parts(a, b), _odd_parts(a, b)
        return tuple(v)


@op("i32x8(i32x8, i32x8)")
def add_neighbours(a: Vector, b: Vector) -> Vector:
    """(a0+a1, a2+a3, b0+b1, b2+b3, a4+a5, a6+a7, b4+b5, b6+b7): phaddd."""
    pairs_a, pairs_b = a[0::2] + a[1::2], b[0::2] + b[1::2]
    return np.concatenate([pairs_a[:2], pairs_b[:2], pairs_a[2:], pairs_b[2:]])


@add_neighbours.emit()
def _emit_add_neighbours(e: Any, a: Any, b: Any) -> Any:
    even, odd = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
    return e.b.add(e.shuffle(a, b, even), e.shuffle(a, b, odd))


@inline
def sums_of_eight(
    d0: Vector, d1: Vector, d2: Vector, d3: Vector, d4: Vector, d5: Vector, d6: Vector, d7: Vector
) -> Vector:
    """Lane i of the result is the sum of all lanes of the i-th vector."""
    low = add_neighbours(add_neighbours(d0, d1), add_neighbours(d2, d3))
    high = add_neighbours(add_neighbours(d4, d5), add_neighbours(d6, d7))
    return add(_lows(low, high), _highs(low, high))


_low_i32x8, _high_i32x8 = permute("i32x8", [0, 1, 2, 3]), permute("i32x8", [4, 5, 6, 7])


@inline
def sums_of_four(d0: Vector, d1: Vector, d2: Vector, d3: Vector) -> Vector:
    """Lane i of the result (i32x4) is the sum of all lanes of the i-th vector."""
    both = add_neighbours(add_neighbours(d0, d1), add_neighbours(d2, d3))
    return add(_low_i32x8(both), _high_i32x8(both))


@op("i16x16(i16x16, lit)")
def spread(x: Vector, i: int) -> Vector:
    """Lane i of each half in all eight lanes of that half."""
    return np.repeat(x[[i, 8 + i]], 8)


@spread.emit()
def _emit_spread(e: Any, x: Any, i: int) -> Any:
    return e.shuffle(x, x, [i] * 8 + [8 + i] * 8)


@op("i16x16(i8x32, lit)")
def spread_bytes(x: Vector, i: int) -> Vector:
    """Byte i of each half, not negative, as int16 in all eight lanes of that half."""
    return np.repeat(x[[i, 16 + i]].astype(np.int16), 8)


@spread_bytes.emit()
def _emit_spread_bytes(e: Any, x: Any, i: int) -> Any:
    # One shuffle that puts zeros between (the general form would broadcast, then widen).
    return e.bitcast(e.shuffle(x, e.constant("i8x32", 0), [i, 32] * 8 + [16 + i, 32] * 8), "i16x16")
