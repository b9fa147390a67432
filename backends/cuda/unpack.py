"""How 32 weights ("a part") of each block type become int8 words: the piece all integer kernels share.

`unpack(w, at, part)` gives (q0..q7, s0, s1, m0, m1): two halves of 16 weights as four int32 words each, so that
weight = s * q - m within a half. `first(part)` and `second(part)` are the halves' positions in the block, multiples
of 16. Layouts: `edgellm.quants.QUANT_TABLE`. Twin: `edgellm.backends.reference`'s dequantisers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from edgellm.backends.base import GGMLType
from edgellm.backends.cuda.device import bits, f16, i8, load4, load16, pair16, u16

__all__ = ["UNPACK", "Unpack"]

f32, i32 = types.float32, types.int32
LOW = 0x0F0F0F0F
ONES = 0x01010101
THREES = 0x03030303
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int32)
MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int32)


class Unpack(NamedTuple):
    """The device functions of one type, and its bytes read per weight."""

    unpack: Callable[..., Any]
    first: Callable[[int], int]
    second: Callable[[int], int]


@cuda.jit(device=True)
def _zero(part):
    return 0


@cuda.jit(device=True)
def _sixteen(part):
    return 16


@cuda.jit(device=True)
def _fifth(four):
    """Four bits -> bit 4 of four bytes."""
    return ((four & 1) << 4) | ((four & 2) << 11) | ((four & 4) << 18) | ((four & 8) << 25)


@cuda.jit(device=True)
def q4_0(w, at, part):
    """18 bytes, nine 2-byte loads; 0.5625 bytes a weight."""
    d = f16(u16(w, at))
    a, b, c, e = pair16(w, at + 2), pair16(w, at + 6), pair16(w, at + 10), pair16(w, at + 14)
    low = (a & LOW, b & LOW, c & LOW, e & LOW)
    high = ((a >> 4) & LOW, (b >> 4) & LOW, (c >> 4) & LOW, (e >> 4) & LOW)
    m = f32(8.0) * d
    return low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3], d, d, m, m


@cuda.jit(device=True)
def q4_1(w, at, part):
    """20 bytes, five 4-byte loads; 0.625 bytes a weight."""
    head = load4(w, at)
    d, m = f16(head), -f16(head >> 16)
    a, b, c, e = load4(w, at + 4), load4(w, at + 8), load4(w, at + 12), load4(w, at + 16)
    low = (a & LOW, b & LOW, c & LOW, e & LOW)
    high = ((a >> 4) & LOW, (b >> 4) & LOW, (c >> 4) & LOW, (e >> 4) & LOW)
    return low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3], d, d, m, m


@cuda.jit(device=True)
def _five(a, b, c, e, fifths):
    """Nibble words and 32 fifth bits -> eight words of 5-bit values."""
    return (
        (a & LOW) | _fifth(bits(fifths, 0, 4)),
        (b & LOW) | _fifth(bits(fifths, 4, 4)),
        (c & LOW) | _fifth(bits(fifths, 8, 4)),
        (e & LOW) | _fifth(bits(fifths, 12, 4)),
        ((a >> 4) & LOW) | _fifth(bits(fifths, 16, 4)),
        ((b >> 4) & LOW) | _fifth(bits(fifths, 20, 4)),
        ((c >> 4) & LOW) | _fifth(bits(fifths, 24, 4)),
        ((e >> 4) & LOW) | _fifth(bits(fifths, 28, 4)),
    )


@cuda.jit(device=True)
def q5_0(w, at, part):
    """22 bytes, eleven 2-byte loads; 0.6875 bytes a weight."""
    d = f16(u16(w, at))
    q = _five(pair16(w, at + 6), pair16(w, at + 10), pair16(w, at + 14), pair16(w, at + 18), pair16(w, at + 2))
    m = f32(16.0) * d
    return q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7], d, d, m, m


@cuda.jit(device=True)
def q5_1(w, at, part):
    """24 bytes, six 4-byte loads; 0.75 bytes a weight."""
    head = load4(w, at)
    d, m = f16(head), -f16(head >> 16)
    q = _five(load4(w, at + 8), load4(w, at + 12), load4(w, at + 16), load4(w, at + 20), load4(w, at + 4))
    return q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7], d, d, m, m


@cuda.jit(device=True)
def q8_0(w, at, part):
    """34 bytes, seventeen 2-byte loads; 1.0625 bytes a weight."""
    d = f16(u16(w, at))
    a, b, c, e = pair16(w, at + 2), pair16(w, at + 6), pair16(w, at + 10), pair16(w, at + 14)
    g, h, i, j = pair16(w, at + 18), pair16(w, at + 22), pair16(w, at + 26), pair16(w, at + 30)
    return a, b, c, e, g, h, i, j, d, d, f32(0.0), f32(0.0)


@cuda.jit(device=True)
def _k_scales(w, at, j):
    """d * scale and dmin * min of sub-blocks j and j + 1 (j even) of a Q4_K or Q5_K block: one 16-byte load."""
    head, a, b, c = load16(w, at)
    shift = 8 * (j & 3)
    x, y, z = bits(a, shift, 16), bits(b, shift, 16), bits(c, shift, 16)
    if j < 4:
        scale0, scale1, low0, low1 = bits(x, 0, 6), bits(x, 8, 6), bits(y, 0, 6), bits(y, 8, 6)
    else:
        scale0, scale1 = i32((z & 15) | (bits(x, 6, 2) << 4)), i32(bits(z, 8, 4) | (bits(x, 14, 2) << 4))
        low0, low1 = i32(bits(z, 4, 4) | (bits(y, 6, 2) << 4)), i32(bits(z, 12, 4) | (bits(y, 14, 2) << 4))
    d, low = f16(head), f16(head >> 16)
    return d * f32(scale0), d * f32(scale1), low * f32(low0), low * f32(low1)


@cuda.jit(device=True)
def _k_first(part):
    return 64 * (part >> 1) + 16 * (part & 1)


@cuda.jit(device=True)
def _k_second(part):
    return 64 * (part >> 1) + 16 * (part & 1) + 32


@cuda.jit(device=True)
def q4_k(w, at, part):
    """144 bytes in 8 parts: one 16-byte load of quants each, one of scales; 0.5625 bytes a weight."""
    a, b, c, e = load16(w, at + 16 + 16 * part)
    s0, s1, m0, m1 = _k_scales(w, at, 2 * (part >> 1))
    low = (a & LOW, b & LOW, c & LOW, e & LOW)
    high = ((a >> 4) & LOW, (b >> 4) & LOW, (c >> 4) & LOW, (e >> 4) & LOW)
    return low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3], s0, s1, m0, m1


@cuda.jit(device=True)
def q5_k(w, at, part):
    """176 bytes in 8 parts: three 16-byte loads each (fifth bits serve four parts); 0.6875 bytes a weight."""
    a, b, c, e = load16(w, at + 48 + 16 * part)
    h0, h1, h2, h3 = load16(w, at + 16 + 16 * (part & 1))
    chunk = part >> 1
    s0, s1, m0, m1 = _k_scales(w, at, 2 * chunk)
    lo, hi = 2 * chunk, 2 * chunk + 1
    return (
        (a & LOW) | (((h0 >> lo) & ONES) << 4),
        (b & LOW) | (((h1 >> lo) & ONES) << 4),
        (c & LOW) | (((h2 >> lo) & ONES) << 4),
        (e & LOW) | (((h3 >> lo) & ONES) << 4),
        ((a >> 4) & LOW) | (((h0 >> hi) & ONES) << 4),
        ((b >> 4) & LOW) | (((h1 >> hi) & ONES) << 4),
        ((c >> 4) & LOW) | (((h2 >> hi) & ONES) << 4),
        ((e >> 4) & LOW) | (((h3 >> hi) & ONES) << 4),
        s0,
        s1,
        m0,
        m1,
    )


@cuda.jit(device=True)
def _q6_first(part):
    return 128 * (part >> 2) + 32 * (part & 1) + 16 * ((part >> 1) & 1)


@cuda.jit(device=True)
def _q6_second(part):
    return _q6_first(part) + 64


@cuda.jit(device=True)
def _q6_word(q, h, shift):
    return (q & LOW) | (((h >> shift) & THREES) << 4)


@cuda.jit(device=True)
def q6_k(w, at, part):
    """210 bytes in 8 parts, 2-byte loads (alignment); high bits serve two parts, from cache; 0.82 bytes a weight."""
    low = at + 64 * (part >> 2) + 32 * (part & 1) + 16 * ((part >> 1) & 1)
    high = at + 128 + 32 * (part >> 2) + 16 * ((part >> 1) & 1)
    a, b, c, e = pair16(w, low), pair16(w, low + 4), pair16(w, low + 8), pair16(w, low + 12)
    h0, h1, h2, h3 = pair16(w, high), pair16(w, high + 4), pair16(w, high + 8), pair16(w, high + 12)
    d = f16(u16(w, at + 208))
    s0 = d * f32(i8(w, at + 192 + _q6_first(part) // 16))
    s1 = d * f32(i8(w, at + 192 + _q6_second(part) // 16))
    x, y = 2 * (part & 1), 2 * (part & 1) + 4
    return (
        _q6_word(a, h0, x),
        _q6_word(b, h1, x),
        _q6_word(c, h2, x),
        _q6_word(e, h3, x),
        _q6_word(a >> 4, h0, y),
        _q6_word(b >> 4, h1, y),
        _q6_word(c >> 4, h2, y),
        _q6_word(e >> 4, h3, y),
        s0,
        s1,
        f32(32.0) * s0,
        f32(32.0) * s1,
    )


def _lookup(levels: np.ndarray[Any, Any]) -> Callable[[int], int]:
    @cuda.jit(device=True)
    def word(nibbles):
        """Four nibbles, one per byte -> four signed bytes of the table."""
        table = cuda.const.array_like(levels)
        a, b = table[bits(nibbles, 0, 4)] & 255, table[bits(nibbles, 8, 4)] & 255
        c, d = table[bits(nibbles, 16, 4)] & 255, table[bits(nibbles, 24, 4)]
        return i32(a | (b << 8) | (c << 16) | (d << 24))

    return word


_iq4 = _lookup(IQ4_LEVELS)
_mxfp4 = _lookup(MXFP4_LEVELS)


@cuda.jit(device=True)
def iq4_nl(w, at, part):
    """18 bytes, nine 2-byte loads, 32 table look-ups; 0.5625 bytes a weight."""
    d = f16(u16(w, at))
    a, b, c, e = pair16(w, at + 2), pair16(w, at + 6), pair16(w, at + 10), pair16(w, at + 14)
    low = (_iq4(a), _iq4(b), _iq4(c), _iq4(e))
    high = (_iq4(a >> 4), _iq4(b >> 4), _iq4(c >> 4), _iq4(e >> 4))
    return low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3], d, d, f32(0.0), f32(0.0)


@cuda.jit(device=True)
def _sub_first(part):
    return 32 * part


@cuda.jit(device=True)
def _sub_second(part):
    return 32 * part + 16


@cuda.jit(device=True)
def iq4_xs(w, at, part):
    """136 bytes in 8 parts: four 4-byte loads of quants (8-byte alignment), table look-ups; 0.53 bytes a weight."""
    head = load4(w, at)
    scale = bits(load4(w, at + 4), 4 * part, 4) | (bits(head, 16 + 2 * part, 2) << 4)
    d = f16(head) * f32(i32(scale - 32))
    base = at + 8 + 16 * part
    a, b, c, e = load4(w, base), load4(w, base + 4), load4(w, base + 8), load4(w, base + 12)
    low = (_iq4(a), _iq4(b), _iq4(c), _iq4(e))
    high = (_iq4(a >> 4), _iq4(b >> 4), _iq4(c >> 4), _iq4(e >> 4))
    return low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3], d, d, f32(0.0), f32(0.0)


@cuda.jit(device=True)
def _bytes4(w, at):
    return (i8(w, at) & 255) | ((i8(w, at + 1) & 255) << 8) | ((i8(w, at + 2) & 255) << 16) | (i8(w, at + 3) << 24)


@cuda.jit(device=True)
def mxfp4(w, at, part):
    """17 bytes, byte loads (odd size), table look-ups; the table is doubled, so the exponent is one less."""
    d = f32(math.ldexp(f32(1.0), (i8(w, at) & 255) - 128))
    a, b, c, e = _bytes4(w, at + 1), _bytes4(w, at + 5), _bytes4(w, at + 9), _bytes4(w, at + 13)
    low = (_mxfp4(a), _mxfp4(b), _mxfp4(c), _mxfp4(e))
    high = (_mxfp4(a >> 4), _mxfp4(b >> 4), _mxfp4(c >> 4), _mxfp4(e >> 4))
    return low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3], d, d, f32(0.0), f32(0.0)


UNPACK: dict[GGMLType, Unpack] = {
    GGMLType.Q4_0: Unpack(q4_0, _zero, _sixteen),
    GGMLType.Q4_1: Unpack(q4_1, _zero, _sixteen),
    GGMLType.Q5_0: Unpack(q5_0, _zero, _sixteen),
    GGMLType.Q5_1: Unpack(q5_1, _zero, _sixteen),
    GGMLType.Q8_0: Unpack(q8_0, _zero, _sixteen),
    GGMLType.Q4_K: Unpack(q4_k, _k_first, _k_second),
    GGMLType.Q5_K: Unpack(q5_k, _k_first, _k_second),
    GGMLType.Q6_K: Unpack(q6_k, _q6_first, _q6_second),
    GGMLType.IQ4_NL: Unpack(iq4_nl, _zero, _sixteen),
    GGMLType.IQ4_XS: Unpack(iq4_xs, _sub_first, _sub_second),
    GGMLType.MXFP4: Unpack(mxfp4, _zero, _sixteen),
}
