"""exp, tanh and erf of float32 vectors without library calls, and memory helpers that kernels share.

Each is a polynomial evaluated in a fixed order: the same bits wherever a value stands in a vector.
"""

from __future__ import annotations

import numpy as np

from edgellm.backends.cpu.jit import inline
from edgellm.backends.cpu.simd import (
    Op,
    Vector,
    absolute,
    add,
    bit_and,
    bit_or,
    div,
    f32x8_as_i32x8,
    fma,
    i32x8_as_f32x8,
    load_f32,
    load_f32x8,
    load_i64,
    maximum,
    minimum,
    mul,
    reinterpret,
    select_less,
    shift_left,
    splat_f32x8,
    splat_f32x16,
    splat_i32x8,
    store,
    store_f32,
    sub,
    truncate_i32x8,
)

__all__ = ["arg", "exp8", "exp16", "gelu8", "load_part", "round_away8", "sigmoid8", "store_part", "tanh8"]

LOG2E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693145751953125), np.float32(1.428606765330187e-06)
# e^r on [-ln2/2, ln2/2] less 1 + r, divided by r^2 (Cephes' expf).
P0, P1, P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
P3, P4, P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
LOWEST, HIGHEST = np.float32(-87.3), np.float32(88.7)
ONE, TWO, HALF, ZERO = np.float32(1), np.float32(2), np.float32(0.5), np.float32(0)
# Adding and taking away 1.5 * 2^23 rounds to the nearest integer, which then stands in the low bits.
ROUNDER = np.float32(12582912.0)

_as_i32x16: Op = reinterpret("f32x16", "i32x16")
_as_f32x16: Op = reinterpret("i32x16", "f32x16")


@inline
def arg(args: int, i: int) -> int:
    """The i-th argument of a kernel."""
    return load_i64(args + 8 * i)


@inline
def exp8(x: Vector) -> Vector:
    """e^x within 2 ulp; 0 below -87.3 (where a float32 result would be subnormal), finite above 88.7."""
    clipped = minimum(maximum(x, splat_f32x8(LOWEST)), splat_f32x8(HIGHEST))
    shifted = fma(clipped, splat_f32x8(LOG2E), splat_f32x8(ROUNDER))
    n = sub(shifted, splat_f32x8(ROUNDER))
    r = fma(n, splat_f32x8(-LN2_HIGH), clipped)
    r = fma(n, splat_f32x8(-LN2_LOW), r)
    p = fma(splat_f32x8(P0), r, splat_f32x8(P1))
    p = fma(p, r, splat_f32x8(P2))
    p = fma(p, r, splat_f32x8(P3))
    p = fma(p, r, splat_f32x8(P4))
    p = fma(p, r, splat_f32x8(P5))
    y = add(fma(p, mul(r, r), r), splat_f32x8(ONE))
    scaled = i32x8_as_f32x8(add(f32x8_as_i32x8(y), shift_left(f32x8_as_i32x8(shifted), 23)))
    return select_less(x, splat_f32x8(LOWEST), splat_f32x8(ZERO), scaled)


@inline
def exp16(x: Vector) -> Vector:
    """`exp8` on sixteen lanes, the same bits."""
    clipped = minimum(maximum(x, splat_f32x16(LOWEST)), splat_f32x16(HIGHEST))
    shifted = fma(clipped, splat_f32x16(LOG2E), splat_f32x16(ROUNDER))
    n = sub(shifted, splat_f32x16(ROUNDER))
    r = fma(n, splat_f32x16(-LN2_HIGH), clipped)
    r = fma(n, splat_f32x16(-LN2_LOW), r)
    p = fma(splat_f32x16(P0), r, splat_f32x16(P1))
    p = fma(p, r, splat_f32x16(P2))
    p = fma(p, r, splat_f32x16(P3))
    p = fma(p, r, splat_f32x16(P4))
    p = fma(p, r, splat_f32x16(P5))
    y = add(fma(p, mul(r, r), r), splat_f32x16(ONE))
    scaled = _as_f32x16(add(_as_i32x16(y), shift_left(_as_i32x16(shifted), 23)))
    return select_less(x, splat_f32x16(LOWEST), splat_f32x16(ZERO), scaled)


@inline
def sigmoid8(x: Vector) -> Vector:
    """1 / (1 + e^-x)."""
    one = splat_f32x8(ONE)
    return div(one, add(one, exp8(sub(splat_f32x8(ZERO), x))))


# tanh on |x| < 0.625: x + x^3 * polynomial(x^2) (Cephes' tanhf).
T0, T1, T2 = np.float32(-5.70498872745e-3), np.float32(2.06390887954e-2), np.float32(-5.37397155531e-2)
T3, T4 = np.float32(1.33314422036e-1), np.float32(-3.33332819422e-1)
TANH_SMALL = np.float32(0.625)
SIGN, REST = -(1 << 31), (1 << 31) - 1


@inline
def _with_sign_of(magnitude: Vector, x: Vector) -> Vector:
    sign = bit_and(f32x8_as_i32x8(x), splat_i32x8(SIGN))
    return i32x8_as_f32x8(bit_or(bit_and(f32x8_as_i32x8(magnitude), splat_i32x8(REST)), sign))


@inline
def tanh8(x: Vector) -> Vector:
    """Hyperbolic tangent: 1 - 2 / (e^2|x| + 1) with x's sign, a polynomial near zero."""
    size = absolute(x)
    one = splat_f32x8(ONE)
    large = sub(one, div(splat_f32x8(TWO), add(exp8(add(size, size)), one)))
    z = mul(x, x)
    p = fma(splat_f32x8(T0), z, splat_f32x8(T1))
    p = fma(p, z, splat_f32x8(T2))
    p = fma(p, z, splat_f32x8(T3))
    p = fma(p, z, splat_f32x8(T4))
    small = fma(mul(p, z), x, x)
    return select_less(size, splat_f32x8(TANH_SMALL), small, _with_sign_of(large, x))


# erfc(a) = t * exp(-a^2 + polynomial(t)), t = 1 / (1 + a/2), a >= 0 (Numerical Recipes' erfcc, 1.2e-7 relative).
ERF = (1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277)
E0, E1, E2, E3, E4, E5, E6, E7, E8 = (np.float32(c) for c in ERF)
E_FIRST = np.float32(-1.26551223)
INV_SQRT2 = np.float32(0.7071067811865476)


@inline
def gelu8(x: Vector) -> Vector:
    """x * (1 + erf(x / sqrt 2)) / 2 = x * erfc(-x / sqrt 2) / 2, accurate in the left tail too."""
    one = splat_f32x8(ONE)
    z = mul(x, splat_f32x8(-INV_SQRT2))
    a = absolute(z)
    t = div(one, fma(a, splat_f32x8(HALF), one))
    p = fma(splat_f32x8(E8), t, splat_f32x8(E7))
    p = fma(p, t, splat_f32x8(E6))
    p = fma(p, t, splat_f32x8(E5))
    p = fma(p, t, splat_f32x8(E4))
    p = fma(p, t, splat_f32x8(E3))
    p = fma(p, t, splat_f32x8(E2))
    p = fma(p, t, splat_f32x8(E1))
    p = fma(p, t, splat_f32x8(E0))
    p = fma(p, t, splat_f32x8(E_FIRST))
    tail = mul(t, exp8(fma(sub(splat_f32x8(ZERO), a), a, p)))
    erfc = select_less(z, splat_f32x8(ZERO), sub(splat_f32x8(TWO), tail), tail)
    return mul(mul(x, splat_f32x8(HALF)), erfc)


@inline
def round_away8(x: Vector) -> Vector:
    """Nearest integers as i32x8, halves away from zero; |x| below 2^22."""
    half = _with_sign_of(splat_f32x8(HALF), x)
    return truncate_i32x8(add(x, half))


@inline
def load_part(address: int, count: int, spare: int) -> Vector:
    """The first `count` <= 8 float32 at an address, zeros behind them; `spare`: 32 bytes of scratch."""
    store(spare, splat_f32x8(ZERO))
    for i in range(count):
        store_f32(spare + 4 * i, load_f32(address + 4 * i))
    return load_f32x8(spare)


@inline
def store_part(address: int, x: Vector, count: int, spare: int) -> None:
    """Write the first `count` < 8 lanes; `spare`: 32 bytes of scratch."""
    store(spare, x)
    for i in range(count):
        store_f32(address + 4 * i, load_f32(spare + 4 * i))
