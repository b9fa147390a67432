"""Ops on 512-bit vectors for the row kernels of AVX-512 machines: packed int16 results, scales, lane sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.backends.cpu.jit import Inline, inline
from edgellm.backends.cpu.simd import DTYPES, Op, Vector, add, op, permute, permute2, split_type, view
from edgellm.backends.cpu.simd_dot import add_pairs
from edgellm.backends.cpu.simd_pack import shifted


@op("i16x32(i32x16, i32x16)", lambda e, a, b: e.call("llvm.x86.avx512.packssdw.512", "i16x32", a, b))
def pack(a: Vector, b: Vector) -> Vector:
    """Per 128 bits: four lanes of a, then four of b, clipped to int16."""
    return np.clip(np.stack([a.reshape(4, 4), b.reshape(4, 4)], 1).reshape(-1), -32768, 32767).astype(np.int16)


@op("V(V)", lambda e, x: e.opaque(x))
def opaque(x: Vector) -> Vector:
    """x, of 512 bits, as it is (LLVM would make one dear two-source shuffle of the cheap ones before and after)."""
    return x


@op("void(i64, lit, lit, lit)")
def prefetch_share(address: int, lines: int, part: int, parts: int) -> None:
    """As `prefetch_far`, of so many cache lines from an address on those of one part (from 0) of `parts`: requests that
    follow each other closely cost bandwidth, those with work between them do not."""


@prefetch_share.emit()
def _emit_prefetch_share(e: Any, address: Any, lines: int, part: int, parts: int) -> None:
    for line in range(lines * part // parts, lines * (part + 1) // parts):
        e.prefetch(e.b.add(address, e.constant("i64", 64 * line)), 2)
        e.barrier()


@op("i32x16(i32x16, i16x32, i16x32)")
def add_scaled(acc: Vector, a: Vector, b: Vector) -> Vector:
    """As `add_pairs`, in one instruction even where acc is ready last (LLVM would take it apart to shorten a chain that
    other work hides)."""
    return add_pairs.twin(acc, a, b)


@add_scaled.emit()
def _emit_add_scaled(e: Any, acc: Any, a: Any, b: Any) -> Any:
    acc, a = e.together(acc, a)
    return add_pairs.emitter("avx512")(e, acc, a, b)


@op("i32x16(i64, i64, i64, i64)")
def load_words_of_four(a: int, b: int, c: int, d: int) -> Vector:
    """16 bytes from each of four addresses."""
    return np.concatenate([view(p, np.int32, 4) for p in (a, b, c, d)])


@load_words_of_four.emit()
def _emit_load_words_of_four(e: Any, *addresses: Any) -> Any:
    a, b, c, d = (e.load(p, "i32x4") for p in addresses)
    low, high = e.shuffle(a, b, list(range(8))), e.shuffle(c, d, list(range(8)))
    return e.shuffle(low, high, list(range(16)))


def _load_repeated(name: str, count: int, result: str) -> Op:
    """An Op that loads `count` bytes and repeats them to fill 64 lanes of int8, or (widened) 32 of int16."""
    element, lanes = split_type(result)
    times = lanes // count

    def twin(address: int) -> Vector:
        return np.tile(view(address, np.int8, count), times).astype(DTYPES[element])

    def emit(e: Any, address: Any) -> Any:
        x = e.load(address, f"i8x{count}")
        return e.extend(e.shuffle(x, x, list(range(count)) * times), result, signed=True)

    twin.__name__ = name
    return op(f"{result}(i64)", emit)(twin)


load_twice = _load_repeated("load_twice", 32, "i8x64")
load_four_times = _load_repeated("load_four_times", 16, "i8x64")
load_scales_twice = _load_repeated("load_scales_twice", 16, "i16x32")


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


@op("i8x64(i8x64, lit, lit)")
def rotated_parts(x: Vector, n: int, step: int) -> Vector:
    """32-bit words rotated left by n bits in the first 128 bits, by n + step in the next, and so on (right if < 0)."""
    by = ((n + step * (np.arange(16) // 4)) % 32).astype(np.uint32)
    words = x.view(np.uint32)
    return (words << by | words >> (32 - by) % 32).view(np.int8)


@rotated_parts.emit()
def _emit_rotated_parts(e: Any, x: Any, n: int, step: int) -> Any:
    import llvmlite.ir as ir

    words = e.bitcast(x, "i32x16")
    by = ir.Constant(words.type, [(n + step * (i // 4)) % 32 for i in range(16)])
    return e.bitcast(e.call("llvm.fshl.v16i32", "i32x16", words, words, by), "i8x64")


@op("i16x8(i32x8)", lambda e, x: e.truncate(x, "i16x8"))
def low_words(x: Vector) -> Vector:
    """Each lane's low 16 bits."""
    return x.astype(np.int16)


@op("f32x16(i32x16, lit)")
def floats_of_four(headers: Vector, n: int) -> Vector:
    """The n-th float16 of each 128 bits as float32: four values, four times."""
    return np.tile(headers.view(np.float16)[n::8], 4).astype(np.float32)


@floats_of_four.emit()
def _emit_floats_of_four(e: Any, headers: Any, n: int) -> Any:
    halves = e.bitcast(headers, "i16x32")
    return e.half_to_float(e.shuffle(halves, halves, [n, n + 8, n + 16, n + 24] * 4), 16)


@op("f32x16(f32x4)", lambda e, x: e.shuffle(x, x, [0, 1, 2, 3] * 4))
def four_times(x: Vector) -> Vector:
    """x in all 128 bits."""
    return np.tile(x, 4)


@op("f32x4(f32x16, lit)", lambda e, x, n: e.shuffle(x, x, [4 * n + i for i in range(4)]))
def part_of_floats(x: Vector, n: int) -> Vector:
    """The n-th 128 bits."""
    return x[4 * n : 4 * n + 4].copy()


# Scales: one packed vector holds, per 128 bits, four results of a first vector of codes and four of a second.
def _scales(source: str, name: str, groups: list[int]) -> Op:
    """An Op from int16 scales and the first group's number (a literal) to a scale per packed lane; `groups`: group
    numbers per four lanes."""
    lanes = np.repeat(groups, 4)

    def twin(x: Vector, first: int) -> Vector:
        return x[lanes + first]

    twin.__name__ = name
    return op(f"i16x32({source}, lit)", lambda e, x, first: e.shuffle(x, x, [int(n) + first for n in lanes]))(twin)


scales_in_order = _scales("i16x32", "scales_in_order", [0, 1, 2, 3, 4, 5, 6, 7])
"""Low nibbles of groups 0, 2, 4, 6 of a super-block, high ones of 1, 3, 5, 7."""
scales_of_sixteens = _scales("i16x32", "scales_of_sixteens", [0, 4, 1, 5, 2, 6, 3, 7])
"""64 bytes of nibbles in order, low and high, where 16 weights have a scale."""


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


# Sums over lanes. A step halves two vectors into one: a blend of both, a shuffle of both, one addition (blends may run
# where shuffles may not).
def in_each(lanes: list[int]) -> list[int]:
    """Indices that pick the same four lanes in each 128 bits; from 4 on they are those of a second vector."""
    return [4 * i + n % 4 + 16 * (n // 4) for i in range(4) for n in lanes]


def _parts(parts: list[int]) -> list[int]:
    """Indices that pick whole 128 bits; from 4 on they are those of a second vector."""
    return [4 * n + i for n in parts for i in range(4)]


def _halving(kept: list[int], moved: list[int]) -> Inline:
    kept_of, moved_of = permute2("i32x16", kept), permute2("i32x16", moved)

    def halved(a: Vector, b: Vector) -> Vector:
        return add(kept_of(a, b), moved_of(a, b))

    return inline(halved)


_pairs = _halving(in_each([0, 1, 6, 7]), in_each([2, 3, 4, 5]))
_lanes = _halving(in_each([0, 5, 2, 7]), in_each([1, 4, 3, 6]))
_halves = _halving(_parts([0, 1, 6, 7]), _parts([2, 3, 4, 5]))
_quarters = _halving(_parts([0, 5, 2, 7]), _parts([1, 4, 3, 6]))
lanes_to_parts = permute("i32x16", [4 * i + n for n in range(4) for i in range(4)])
"""Lane n of 128-bit part i becomes lane i of part n."""


@inline
def sums_of_lanes(a: Vector, b: Vector, c: Vector, d: Vector) -> Vector:
    """Per 128 bits: the sum of a's four lanes, of b's, of c's, of d's."""
    return _lanes(_pairs(a, c), _pairs(b, d))


@inline
def sums_of_parts(a: Vector, b: Vector, c: Vector, d: Vector) -> Vector:
    """In the first 128 bits a's four parts of 128 bits added up, in the next b's, and so on."""
    return _quarters(_halves(a, c), _halves(b, d))
