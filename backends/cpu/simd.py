"""Vector types and instructions as plain Python functions: what every CPU kernel is written in.

A type is written `f32x8` (eight float32), `i8x32`, `i16x16`, `i32x8`, any power-of-two width; integers have no sign of
their own, the op says how it reads them. Scalars are `i64` (all integers and addresses) and `f32`. `V` in a signature
is any vector type, `lit` a constant known when the kernel is compiled.

Each `Op` has two bodies. The decorated function is its meaning in numpy (its twin): tests and NUMBA_DISABLE_JIT=1 run
it. `emit` gives the LLVM instructions, once in general and where it pays per instruction set; `jit.py` uses those.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.backends.cpu.simd_memory import *  # noqa: F403  (kernels import all Ops from here)
from edgellm.backends.cpu.simd_op import *  # noqa: F403
from edgellm.backends.cpu.simd_op import DTYPES, ISA, Op, Vector, op, split_type


# Making vectors.
def _splat(type_name: str) -> Op:
    element, count = split_type(type_name)
    scalar = "f32" if element == "f32" else "i64"

    def twin(x: Any) -> Vector:
        value = x if element == "f32" else np.array(int(x)).astype(DTYPES[element])
        return np.full(count, value, DTYPES[element])

    twin.__name__ = f"splat_{type_name}"
    twin.__doc__ = f"A {type_name} of one value."
    emit = lambda e, x: e.splat(x if element == "f32" else e.truncate(x, element), count)  # noqa: E731
    return op(f"{type_name}({scalar})", emit)(twin)


splat_f32x8 = _splat("f32x8")
splat_f32x16 = _splat("f32x16")
splat_i8x16 = _splat("i8x16")
splat_i8x32 = _splat("i8x32")
splat_i8x64 = _splat("i8x64")
splat_i16x16 = _splat("i16x16")
splat_i32x4 = _splat("i32x4")
splat_i32x8 = _splat("i32x8")
splat_i32x16 = _splat("i32x16")


def reinterpret(source: str, target: str) -> Op:
    """An Op that reads the bits of one vector type as another of the same size."""
    element = split_type(target)[0]

    def twin(x: Vector) -> Vector:
        return x.view(DTYPES[element])

    twin.__name__ = f"{source}_as_{target}"
    return op(f"{target}({source})", lambda e, x: e.bitcast(x, target))(twin)


i32x8_as_f32x8 = reinterpret("i32x8", "f32x8")
f32x8_as_i32x8 = reinterpret("f32x8", "i32x8")


def permute(source: str, indices: list[int]) -> Op:
    """An Op that picks lanes by constant indices; the result has len(indices) lanes."""
    element = split_type(source)[0]
    picked = np.array(indices)

    def twin(x: Vector) -> Vector:
        return x[picked]

    twin.__name__ = f"permute_{source}"
    return op(f"{element}x{len(indices)}({source})", lambda e, x: e.shuffle(x, x, indices))(twin)


def permute2(source: str, indices: list[int]) -> Op:
    """As `permute`, over the lanes of two vectors one after the other."""
    element = split_type(source)[0]
    picked = np.array(indices)

    def twin(a: Vector, b: Vector) -> Vector:
        return np.concatenate([a, b])[picked]

    twin.__name__ = f"permute2_{source}"
    return op(f"{element}x{len(indices)}({source}, {source})", lambda e, a, b: e.shuffle(a, b, indices))(twin)


# Arithmetic, lane by lane; integers wrap.
@op("V(V, V)", lambda e, a, b: e.arithmetic("add", a, b))
def add(a: Vector, b: Vector) -> Vector:
    """a + b."""
    return a + b


@op("V(V, V)", lambda e, a, b: e.arithmetic("sub", a, b))
def sub(a: Vector, b: Vector) -> Vector:
    """a - b."""
    return a - b


@op("V(V, V)", lambda e, a, b: e.arithmetic("mul", a, b))
def mul(a: Vector, b: Vector) -> Vector:
    """a * b."""
    return a * b


@op("V(V, V)", lambda e, a, b: e.b.fdiv(a, b))
def div(a: Vector, b: Vector) -> Vector:
    """a / b of floats."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return a / b


@op("V(V, V, V)", lambda e, a, b, c: e.fma(a, b, c))
def fma(a: Vector, b: Vector, c: Vector) -> Vector:
    """a * b + c of floats, rounded once (twice where the machine has no such instruction)."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


@op("V(V, V)", lambda e, a, b: e.extremum("o>", a, b))
def maximum(a: Vector, b: Vector) -> Vector:
    """a where a > b, else b (floats; signed integers)."""
    return np.where(a > b, a, b)


@op("V(V, V)", lambda e, a, b: e.extremum("o<", a, b))
def minimum(a: Vector, b: Vector) -> Vector:
    """a where a < b, else b (floats; signed integers)."""
    return np.where(a < b, a, b)


@op("V(V)", lambda e, a: e.absolute(a))
def absolute(a: Vector) -> Vector:
    """|a| of floats."""
    return np.abs(a)


@op("V(V, V)", lambda e, a, b: e.b.and_(a, b))
def bit_and(a: Vector, b: Vector) -> Vector:
    """a & b of integers."""
    return a & b


@op("V(V, V)", lambda e, a, b: e.b.or_(a, b))
def bit_or(a: Vector, b: Vector) -> Vector:
    """a | b of integers."""
    return a | b


@op("V(V, V)", lambda e, a, b: e.b.xor(a, b))
def bit_xor(a: Vector, b: Vector) -> Vector:
    """a ^ b of integers."""
    return a ^ b


@op("V(V, lit)", lambda e, a, n: e.shift("shl", a, n))
def shift_left(a: Vector, n: int) -> Vector:
    """Each lane moved left by n bits."""
    return a << a.dtype.type(n)


@op("V(V, lit)", lambda e, a, n: e.shift("lshr", a, n))
def shift_right(a: Vector, n: int) -> Vector:
    """Each lane moved right by n bits, zeros coming in."""
    unsigned = a.view(f"u{a.dtype.itemsize}")
    return (unsigned >> unsigned.dtype.type(n)).view(a.dtype)


@op("V(V, V, V, V)", lambda e, a, b, x, y: e.select_less(a, b, x, y))
def select_less(a: Vector, b: Vector, x: Vector, y: Vector) -> Vector:
    """x where a < b (floats), else y."""
    return np.where(a < b, x, y)


# Conversions.
def _widen(source: str, target: str, signed: bool) -> Op:
    element = split_type(target)[0]

    def twin(x: Vector) -> Vector:
        return (x if signed else x.view(f"u{x.dtype.itemsize}")).astype(DTYPES[element])

    twin.__name__ = f"{'sign' if signed else 'zero'}_extend_{source}"
    return op(f"{target}({source})", lambda e, x: e.extend(x, target, signed))(twin)


sign_extend_i8x16 = _widen("i8x16", "i16x16", True)
zero_extend_i8x16 = _widen("i8x16", "i16x16", False)
sign_extend_i16x8 = _widen("i16x8", "i32x8", True)


def _int_to_float(count: int) -> Op:
    def twin(x: Vector) -> Vector:
        return x.astype(np.float32)

    twin.__name__ = f"to_f32x{count}"
    return op(f"f32x{count}(i32x{count})", lambda e, x: e.float_of_int(x, f"f32x{count}"))(twin)


to_f32x4 = _int_to_float(4)
to_f32x8 = _int_to_float(8)


@op("i32x8(f32x8)", lambda e, x: e.b.fptosi(e.call("llvm.rint.v8f32", "f32x8", x), e.type("i32x8")))
def round_i32x8(x: Vector) -> Vector:
    """Nearest integers, ties to even; |x| below 2^31."""
    return np.rint(x).astype(np.int32)


@op("i32x8(f32x8)", lambda e, x: e.b.fptosi(x, e.type("i32x8")))
def truncate_i32x8(x: Vector) -> Vector:
    """Towards zero; |x| below 2^31."""
    return x.astype(np.int32)


low_i8x32 = permute("i8x32", list(range(16)))
high_i8x32 = permute("i8x32", list(range(16, 32)))
low_i16x16 = permute("i16x16", list(range(8)))
high_i16x16 = permute("i16x16", list(range(8, 16)))
twice_i8x16 = permute("i8x16", list(range(16)) * 2)


@op("i8x32(i32x8, i32x8, i32x8, i32x8)")
def narrow_i32x8(a: Vector, b: Vector, c: Vector, d: Vector) -> Vector:
    """The low bytes of four vectors of eight, in order: i8x32."""
    return np.concatenate([a, b, c, d]).astype(np.int8)


@narrow_i32x8.emit()
def _emit_narrow(e: Any, *parts: Any) -> Any:
    small = [e.truncate(p, "i8x8") for p in parts]
    low, high = (e.shuffle(x, y, list(range(16))) for x, y in (small[:2], small[2:]))
    return e.shuffle(low, high, list(range(32)))


# Sums over lanes: fixed trees, so that the bits never depend on how a kernel was compiled.
@op("i64(i32x8)")
def sum_i32x8(x: Vector) -> int:
    """Sum of the lanes (must fit int32)."""
    return int(x.sum(dtype=np.int32))


@sum_i32x8.emit()
def _emit_sum_i32x8(e: Any, x: Any) -> Any:
    return e.extend(e.call("llvm.vector.reduce.add.v8i32", "i32", x), "i64", signed=True)


@op("f32(f32x8)")
def sum_f32x8(x: Vector) -> np.float32:
    """((x0+x4) + (x2+x6)) + ((x1+x5) + (x3+x7))."""
    half = x[:4] + x[4:]
    pair = half[:2] + half[2:]
    return np.float32(pair[0] + pair[1])


@sum_f32x8.emit()
def _emit_sum_f32x8(e: Any, x: Any) -> Any:
    half = e.b.fadd(e.shuffle(x, x, [0, 1, 2, 3]), e.shuffle(x, x, [4, 5, 6, 7]))
    pair = e.b.fadd(e.shuffle(half, half, [0, 1]), e.shuffle(half, half, [2, 3]))
    return e.b.fadd(e.lane(pair, 0), e.lane(pair, 1))


@op("f32(f32x8, lit)", lambda e, x, i: e.lane(x, i))
def lane_f32x8(x: Vector, i: int) -> np.float32:
    """One lane."""
    return np.float32(x[i])


@op("f32(f32x16)")
def sum_f32x16(x: Vector) -> np.float32:
    """`sum_f32x8` of the two halves added lane by lane."""
    return sum_f32x8.twin(x[:8] + x[8:])


@sum_f32x16.emit()
def _emit_sum_f32x16(e: Any, x: Any) -> Any:
    return _emit_sum_f32x8(e, e.b.fadd(e.shuffle(x, x, list(range(8))), e.shuffle(x, x, list(range(8, 16)))))


@op("f32(f32x8)")
def max_f32x8(x: Vector) -> np.float32:
    """Largest lane."""
    return np.float32(x.max())


@max_f32x8.emit()
def _emit_max_f32x8(e: Any, x: Any) -> Any:
    half = e.extremum("o>", e.shuffle(x, x, [0, 1, 2, 3]), e.shuffle(x, x, [4, 5, 6, 7]))
    pair = e.extremum("o>", e.shuffle(half, half, [0, 1]), e.shuffle(half, half, [2, 3]))
    return e.extremum("o>", e.lane(pair, 0), e.lane(pair, 1))


@op("f32(f32x16)")
def max_f32x16(x: Vector) -> np.float32:
    """Largest lane."""
    return np.float32(x.max())


@max_f32x16.emit()
def _emit_max_f32x16(e: Any, x: Any) -> Any:
    low, high = e.shuffle(x, x, list(range(8))), e.shuffle(x, x, list(range(8, 16)))
    return _emit_max_f32x8(e, e.extremum("o>", low, high))


# Integer products.
@op("i16x16(i8x32, i8x32)")
def mul_pairs_u8(a: Vector, b: Vector) -> Vector:
    """Unsigned a times signed b, neighbours added, clipped to int16 (pmaddubsw)."""
    product = a.view(np.uint8).astype(np.int32) * b.astype(np.int32)
    return np.clip(product[0::2] + product[1::2], -32768, 32767).astype(np.int16)


@mul_pairs_u8.emit("avx2", "avx512")
def _emit_mul_pairs_u8(e: Any, a: Any, b: Any) -> Any:
    return e.call("llvm.x86.avx2.pmadd.ub.sw", "i16x16", a, b)


@mul_pairs_u8.emit()
def _emit_mul_pairs_u8_general(e: Any, a: Any, b: Any) -> Any:
    product = e.b.mul(e.extend(a, "i16x32", signed=False), e.extend(b, "i16x32", signed=True))
    even, odd = e.shuffle(product, product, list(range(0, 32, 2))), e.shuffle(product, product, list(range(1, 32, 2)))
    return e.call("llvm.sadd.sat.v16i16", "i16x16", even, odd)


@op("i32x8(i16x16, i16x16)")
def mul_pairs_i16(a: Vector, b: Vector) -> Vector:
    """Signed products of int16, neighbours added in int32 (pmaddwd)."""
    product = a.astype(np.int32) * b.astype(np.int32)
    return product[0::2] + product[1::2]


@mul_pairs_i16.emit("avx2", "avx512")
def _emit_mul_pairs_i16(e: Any, a: Any, b: Any) -> Any:
    return e.call("llvm.x86.avx2.pmadd.wd", "i32x8", a, b)


@mul_pairs_i16.emit()
def _emit_mul_pairs_i16_general(e: Any, a: Any, b: Any) -> Any:
    product = e.b.mul(e.extend(a, "i32x16", signed=True), e.extend(b, "i32x16", signed=True))
    return e.b.add(
        e.shuffle(product, product, list(range(0, 16, 2))), e.shuffle(product, product, list(range(1, 16, 2)))
    )


@op("i32x8(i32x8, i8x32, i8x32)")
def dot_u7(acc: Vector, a: Vector, b: Vector) -> Vector:
    """acc + sums of four products, a in 0..127 times signed b."""
    product = a.view(np.uint8).astype(np.int32) * b.astype(np.int32)
    return acc + product.reshape(8, 4).sum(1, dtype=np.int32)


@dot_u7.emit()
def _emit_dot_u7(e: Any, acc: Any, a: Any, b: Any) -> Any:
    pairs = mul_pairs_u8.emitter(ISA)(e, a, b)
    return e.b.add(acc, mul_pairs_i16.emitter(ISA)(e, pairs, e.constant("i16x16", 1)))


@dot_u7.emit("avx512")
def _emit_dot_u7_vnni(e: Any, acc: Any, a: Any, b: Any) -> Any:
    return e.vnni_dot(acc, a, b)


@dot_u7.emit("neon")
def _emit_dot_u7_neon(e: Any, acc: Any, a: Any, b: Any) -> Any:
    return e.by_halves("llvm.aarch64.neon.sdot.v4i32.v16i8", acc, a, b)
