"""Ops on 512-bit vectors for the row kernels of AVX-512 machines: packed int16 results, scales, lane sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.backends.cpu.jit import inline
from edgellm.backends.cpu.simd import Op, Vector, add, op, permute, permute2, view
from edgellm.backends.cpu.simd_pack import shifted


@op("i16x32(i32x16, i32x16)", lambda e, a, b: e.call("llvm.x86.avx512.packssdw.512", "i16x32", a, b))
def pack(a: Vector, b: Vector) -> Vector:
    """Per 128 bits: four lanes of a, then four of b, clipped to int16."""
    return np.clip(np.stack([a.reshape(4, 4), b.reshape(4, 4)], 1).reshape(-1), -32768, 32767).astype(np.int16)


@op("V(V)", lambda e, x: e.opaque(x))
def opaque(x: Vector) -> Vector:
    """x, of 512 bits, as it is (LLVM would make one dear two-source shuffle of the cheap ones before and after)."""
    return x


@op("void(i64, lit, lit)")
def prefetch_share(address: int, lines: int, eighth: int) -> None:
    """As `prefetch_far`, of one eighth (0 to 7) of so many cache lines from an address on."""


@prefetch_share.emit()
def _emit_prefetch_share(e: Any, address: Any, lines: int, eighth: int) -> None:
    for line in range(lines * eighth // 8, lines * (eighth + 1) // 8):
        e.prefetch(e.b.add(address, e.constant("i64", 64 * line)), 2)
        e.barrier()


@op("i32x16(i64, i64, i64, i64)")
def load_words_of_four(a: int, b: int, c: int, d: int) -> Vector:
    """16 bytes from each of four addresses."""
    return np.concatenate([view(p, np.int32, 4) for p in (a, b, c, d)])


@load_words_of_four.emit()
def _emit_load_words_of_four(e: Any, *addresses: Any) -> Any:
    a, b, c, d = (e.load(p, "i32x4") for p in addresses)
    low, high = e.shuffle(a, b, list(range(8))), e.shuffle(c, d, list(range(8)))
    return e.shuffle(low, high, list(range(16)))


@op("i8x64(i64)")
def load_twice(address: int) -> Vector:
    """32 bytes from memory, twice."""
    return np.tile(view(address, np.int8, 32), 2)


@load_twice.emit()
def _emit_load_twice(e: Any, address: Any) -> Any:
    x = e.load(address, "i8x32")
    return e.shuffle(x, x, list(range(32)) * 2)


@op("i8x64(i8x64, lit, lit)")
def shifted_halves(x: Vector, n: int, m: int) -> Vector:
    """As `shifted`, the lower 256 bits by n, the upper by m (both left or both right)."""
    return np.concatenate([shifted.twin(x[:32], n), shifted.twin(x[32:], m)])


@shifted_halves.emit()
def _emit_shifted_halves(e: Any, x: Any, n: int, m: int) -> Any:
    import llvmlite.ir as ir

    words = e.bitcast(x, "i16x32")
    by = ir.Constant(words.type, [abs(n)] * 16 + [abs(m)] * 16)
    return e.bitcast(e.b.lshr(words, by) if n + m < 0 else e.b.shl(words, by), "i8x64")


@op("i16x8(i32x8)", lambda e, x: e.truncate(x, "i16x8"))
def low_words(x: Vector) -> Vector:
    """Each lane's low 16 bits."""
    return x.astype(np.int16)


_HALVES = [0, 2, 4, 6, 1, 3, 5, 7]


@op("f32x8(i32x4)", lambda e, x: e.half_to_float(e.shuffle(e.bitcast(x, "i16x8"), e.constant("i16x8", 0), _HALVES), 8))
def halves_to_floats(x: Vector) -> Vector:
    """The low float16 of each lane, then the high ones, as float32."""
    return x.view(np.float16)[_HALVES].astype(np.float32)


# Scales: one packed vector holds, per 128 bits, four results of a first vector of codes and four of a second.
def _scales(source: str, name: str, groups: list[int]) -> Op:
    """An Op from int16 scales and the first group's number (a literal) to a scale per packed lane; `groups`: group
    numbers per four lanes."""
    lanes = np.repeat(groups, 4)

    def twin(x: Vector, first: int) -> Vector:
        return x[lanes + first]

    twin.__name__ = name
    return op(f"i16x32({source}, lit)", lambda e, x, first: e.shuffle(x, x, [int(n) + first for n in lanes]))(twin)


scales_of_nibbles = _scales("i16x32", "scales_of_nibbles", [0, 1, 0, 1, 2, 3, 2, 3])
"""64 bytes of nibbles, low and high: groups of 32 weights."""
scales_of_sixteens = _scales("i16x16", "scales_of_sixteens", [0, 4, 1, 5, 2, 6, 3, 7])
"""The same where 16 weights have a scale."""


@op("i32x16(i32x8, lit)")
def scales_of_lanes(x: Vector, first: int) -> Vector:
    """Four lanes from `first` on, each in all lanes of 128 bits."""
    return np.repeat(x[first : first + 4], 4)


@scales_of_lanes.emit()
def _emit_scales_of_lanes(e: Any, x: Any, first: int) -> Any:
    return e.shuffle(x, x, [first + i // 4 for i in range(16)])


@op("i32x8(i64)")
def load_iq4_scales(address: int) -> Vector:
    """Eight 6-bit scales minus 32: two high bits of each in 16 bits, then four low bits of each in 32."""
    high, low = int(view(address, np.uint16, 1)[0]), int(view(address + 2, np.uint32, 1)[0])
    return np.array([(low >> 4 * i & 15) | (high >> 2 * i & 3) << 4 for i in range(8)], np.int32) - np.int32(32)


@load_iq4_scales.emit()
def _emit_load_iq4_scales(e: Any, address: Any) -> Any:
    import llvmlite.ir as ir

    kind = e.type("i32x8")
    low = e.splat(e.load(e.b.add(address, e.constant("i64", 2)), "i32"), 8)
    # Four places up, so that the two bits arrive at bit 4.
    high = e.splat(e.b.shl(e.extend(e.load(address, "i16"), "i32", signed=False), e.constant("i32", 4)), 8)
    low = e.b.and_(e.b.lshr(low, ir.Constant(kind, [4 * i for i in range(8)])), e.constant("i32x8", 15))
    high = e.b.and_(e.b.lshr(high, ir.Constant(kind, [2 * i for i in range(8)])), e.constant("i32x8", 0x30))
    return e.b.sub(e.b.or_(low, high), e.constant("i32x8", 32))


# Sums over lanes.
def in_each(lanes: list[int]) -> list[int]:
    """Indices that pick the same four lanes in each 128 bits; from 4 on they are those of a second vector."""
    return [4 * i + n % 4 + 16 * (n // 4) for i in range(4) for n in lanes]


_zip_low, _zip_high = permute2("i32x16", in_each([0, 4, 1, 5])), permute2("i32x16", in_each([2, 6, 3, 7]))
_zip_low2, _zip_high2 = permute2("i32x16", in_each([0, 1, 4, 5])), permute2("i32x16", in_each([2, 3, 6, 7]))
_low, _high = permute("i32x16", list(range(8))), permute("i32x16", list(range(8, 16)))
_low4, _high4 = permute("i32x8", list(range(4))), permute("i32x8", list(range(4, 8)))
_swap2, _swap1 = permute("i32x16", in_each([2, 3, 0, 1])), permute("i32x16", in_each([1, 0, 3, 2]))
first_of_each = permute("i32x16", [0, 4, 8, 12])
join_i32x4 = permute2("i32x4", list(range(8)))


@inline
def sums_of_four_wide(a: Vector, b: Vector, c: Vector, d: Vector) -> Vector:
    """Lane i of the result (i32x4) is the sum of all lanes of the i-th vector."""
    ab, cd = add(_zip_low(a, b), _zip_high(a, b)), add(_zip_low(c, d), _zip_high(c, d))
    s = add(_zip_low2(ab, cd), _zip_high2(ab, cd))
    s = add(_low(s), _high(s))
    return add(_low4(s), _high4(s))


@inline
def sums_in_each(x: Vector) -> Vector:
    """The sum of the four lanes of each 128 bits (i32x4)."""
    x = add(x, _swap2(x))
    return first_of_each(add(x, _swap1(x)))
