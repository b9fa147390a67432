"""Products of small integers, added into int32 lanes, exactly: what differs most between instruction sets."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.backends.cpu.simd import (
    ISA,
    Vector,
    mul_pairs_i16,
    mul_pairs_u8,
    op,
)
from edgellm.backends.cpu.simd_wide import BYTES, INTS, PAIRS, WIDE_OFFSET


@op("V(V)", lambda e, a: e.b.select(e.b.icmp_signed("<", a, e.b.sub(a, a)), e.b.sub(e.b.sub(a, a), a), a))
def absolute_bytes(a: Vector) -> Vector:
    """|a| of int8; -128 becomes the unsigned 128."""
    return np.where(a < 0, -a, a).astype(np.int8)


@op("V(V, V)")
def negate_where(a: Vector, sign: Vector) -> Vector:
    """a times -1, 0 or 1: the sign of the other byte (psignb)."""
    return (a * np.sign(sign)).astype(np.int8)


@negate_where.emit()
def _emit_negate_where(e: Any, a: Any, sign: Any) -> Any:
    if ISA in ("avx2", "avx512") and a.type.count == 32:
        return e.call("llvm.x86.avx2.psign.b", "i8x32", a, sign)
    zero = e.b.sub(a, a)
    negated = e.b.select(e.b.icmp_signed("<", sign, zero), e.b.sub(zero, a), a)
    return e.b.select(e.b.icmp_signed("==", sign, zero), zero, negated)


# Products of bytes, native width. `w` are weights in a tile (see `tile_dot` below for the ranges), `x` activations.
def _dot_twin(acc: Vector, w: Vector, x: Vector) -> Vector:
    product = w.view(np.uint8).astype(np.int32) * x.astype(np.int32)
    return acc + product.reshape(-1, 4).sum(1, dtype=np.int32)


@op(f"{INTS}({INTS}, {BYTES}, {BYTES})")
def dot_unsigned(acc: Vector, w: Vector, x: Vector) -> Vector:
    """acc + sums of four products, w in 0..127 (0..255 with AVX-512) times signed x."""
    return _dot_twin(acc, w, x)


@dot_unsigned.emit("avx512")
def _emit_dot_unsigned_vnni(e: Any, acc: Any, w: Any, x: Any) -> Any:
    return e.vnni_dot(acc, w, x)


@dot_unsigned.emit("neon")
def _emit_dot_unsigned_neon(e: Any, acc: Any, w: Any, x: Any) -> Any:
    return e.by_halves("llvm.aarch64.neon.sdot.v4i32.v16i8", acc, w, x)


@dot_unsigned.emit()
def _emit_dot_unsigned(e: Any, acc: Any, w: Any, x: Any) -> Any:
    pairs = mul_pairs_u8.emitter(ISA)(e, w, x)
    return e.b.add(acc, mul_pairs_i16.emitter(ISA)(e, pairs, e.constant("i16x16", 1)))


@op(f"{INTS}({INTS}, {PAIRS}, {PAIRS})")
def add_pairs(acc: Vector, a: Vector, b: Vector) -> Vector:
    """acc + sums of two int16 products (pmaddwd, or vpdpwssd which adds as well)."""
    product = a.astype(np.int32) * b.astype(np.int32)
    return acc + product[0::2] + product[1::2]


@add_pairs.emit()
def _emit_add_pairs(e: Any, acc: Any, a: Any, b: Any) -> Any:
    return e.b.add(acc, mul_pairs_i16.emitter(ISA)(e, a, b))


def llvm_version() -> int:
    """LLVM's major version."""
    import llvmlite.binding as llvm

    return int(llvm.llvm_version_info[0])


@add_pairs.emit("avx512")
def _emit_add_pairs_vnni(e: Any, acc: Any, a: Any, b: Any) -> Any:
    bits = acc.type.count * 32
    if llvm_version() < 22:  # older LLVMs declare the operands as int32 lanes
        a, b = (e.bitcast(v, f"i32x{bits // 32}") for v in (a, b))
    return e.call(f"llvm.x86.avx512.vpdpwssd.{bits}", f"i32x{bits // 32}", acc, a, b)


@op("i32x8(i32x8, i16x16, i16x16)")
def add_pairs_i16x16(acc: Vector, a: Vector, b: Vector) -> Vector:
    """As `add_pairs`, on 256 bits."""
    product = a.astype(np.int32) * b.astype(np.int32)
    return acc + product[0::2] + product[1::2]


add_pairs_i16x16.emit()(_emit_add_pairs)
add_pairs_i16x16.emit("avx512")(_emit_add_pairs_vnni)


@op("i32x8(i32x8, i8x32, i8x32, i16x16)")
def dot_scaled(acc: Vector, w: Vector, x: Vector, scale: Vector) -> Vector:
    """acc + scale times sums of four products: w in 0..127, signed x; both int16 of a lane hold its scale."""
    product = w.view(np.uint8).astype(np.int32) * x.astype(np.int32)
    return acc + product.reshape(8, 4).sum(1, dtype=np.int32) * scale[0::2].astype(np.int32)


@dot_scaled.emit()
def _emit_dot_scaled(e: Any, acc: Any, w: Any, x: Any, scale: Any) -> Any:
    return add_pairs_i16x16.emitter(ISA)(e, acc, mul_pairs_u8.emitter(ISA)(e, w, x), scale)


@dot_scaled.emit("neon")
def _emit_dot_scaled_neon(e: Any, acc: Any, w: Any, x: Any, scale: Any) -> Any:
    zero = e.constant("i32x8", 0)
    dot = e.by_halves("llvm.aarch64.neon.sdot.v4i32.v16i8", zero, w, x)
    return e.b.add(acc, e.b.mul(dot, e.b.ashr(e.bitcast(scale, "i32x8"), e.constant("i32x8", 16))))


@op("i32x8(i32x8, i8x32, i8x32, i16x16)")
def dot_scaled_signed(acc: Vector, w: Vector, x: Vector, scale: Vector) -> Vector:
    """As `dot_scaled` with signed w; x never -128."""
    product = w.astype(np.int32) * x.astype(np.int32)
    return acc + product.reshape(8, 4).sum(1, dtype=np.int32) * scale[0::2].astype(np.int32)


@dot_scaled_signed.emit()
def _emit_dot_scaled_signed(e: Any, acc: Any, w: Any, x: Any, scale: Any) -> Any:
    magnitude = absolute_bytes.emitter(ISA)(e, w)
    return _emit_dot_scaled(e, acc, magnitude, negate_where.emitter(ISA)(e, x, w), scale)


dot_scaled_signed.emit("neon")(_emit_dot_scaled_neon)


@op("i32x8(i8x32, i8x32)")
def dot_signed(w: Vector, x: Vector) -> Vector:
    """Sums of four products of signed bytes; x never -128."""
    return (w.astype(np.int32) * x.astype(np.int32)).reshape(8, 4).sum(1, dtype=np.int32)


@dot_signed.emit("avx2", "scalar")
def _emit_dot_signed(e: Any, w: Any, x: Any) -> Any:
    pairs = mul_pairs_u8.emitter(ISA)(e, absolute_bytes.emitter(ISA)(e, w), negate_where.emitter(ISA)(e, x, w))
    return mul_pairs_i16.emitter(ISA)(e, pairs, e.constant("i16x16", 1))


@dot_signed.emit("avx512")
def _emit_dot_signed_vnni(e: Any, w: Any, x: Any) -> Any:
    magnitude = absolute_bytes.emitter(ISA)(e, w)
    return e.vnni_dot(e.constant("i32x8", 0), magnitude, negate_where.emitter(ISA)(e, x, w))


@dot_signed.emit("neon")
def _emit_dot_signed_neon(e: Any, w: Any, x: Any) -> Any:
    return e.by_halves("llvm.aarch64.neon.sdot.v4i32.v16i8", e.constant("i32x8", 0), w, x)


@op(f"{INTS}({INTS}, {BYTES}, {BYTES})")
def dot_wide(acc: Vector, w: Vector, x: Vector) -> Vector:
    """acc + sums of four products: signed w stored plus WIDE_OFFSET, signed x (never -128)."""
    weights = w.view(np.uint8 if WIDE_OFFSET else np.int8).astype(np.int32)
    return acc + (weights * x.astype(np.int32)).reshape(-1, 4).sum(1, dtype=np.int32)


@dot_wide.emit("avx512")
def _emit_dot_wide_vnni(e: Any, acc: Any, w: Any, x: Any) -> Any:
    return e.vnni_dot(acc, w, x)


@dot_wide.emit()
def _emit_dot_wide(e: Any, acc: Any, w: Any, x: Any) -> Any:
    return e.b.add(acc, dot_signed.emitter(ISA)(e, w, x))
