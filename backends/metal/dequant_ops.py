"""Weights from GGUF blocks in plain MLX ops: the twin of every matvec kernel, and what devices without Metal run.

Each function takes the file's bytes as uint8 (rows, blocks, type_size) and gives float32 (rows, blocks, block_size).
Block layouts: `edgellm.quants.QUANT_TABLE`. Arithmetic order follows ggml's dequantisers, so results equal theirs
except where a product of two scales rounds (a few 1e-8 relative).
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from edgellm.quants import QUANT_TABLE, GGMLType

__all__ = ["DEQUANT", "dequantize"]

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The 16 levels of IQ4_NL and IQ4_XS."""
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""E2M1 values times two; the block scale is halved to match."""


def _f16(b: mx.array, at: int) -> mx.array:
    """The float16 at byte `at` of each block, as float32 (rows, blocks, 1)."""
    return mx.contiguous(b[..., at : at + 2]).view(mx.float16).astype(mx.float32)


def _u32(b: mx.array, at: int) -> mx.array:
    return mx.contiguous(b[..., at : at + 4]).view(mx.uint32)


def _nibbles(q: mx.array) -> mx.array:
    """16 bytes -> 32 values: low nibbles first, then high."""
    return mx.concatenate([q & 15, q >> 4], axis=-1)


def _fifth_bits(b: mx.array, at: int) -> mx.array:
    """Bit i of the uint32 at byte `at`, for i = 0..31, as 0 or 16."""
    return ((_u32(b, at) >> mx.arange(32, dtype=mx.uint32)) & 1).astype(mx.uint8) << 4


def _f32(b: mx.array) -> mx.array:
    return mx.contiguous(b).view(mx.float32)


def _f16_plain(b: mx.array) -> mx.array:
    return mx.contiguous(b).view(mx.float16).astype(mx.float32)


def _bf16(b: mx.array) -> mx.array:
    return mx.contiguous(b).view(mx.bfloat16).astype(mx.float32)


def _q4_0(b: mx.array) -> mx.array:
    return _f16(b, 0) * (_nibbles(b[..., 2:]).astype(mx.float32) - 8)


def _q4_1(b: mx.array) -> mx.array:
    return _f16(b, 0) * _nibbles(b[..., 4:]).astype(mx.float32) + _f16(b, 2)


def _q5_0(b: mx.array) -> mx.array:
    q = _nibbles(b[..., 6:]) | _fifth_bits(b, 2)
    return _f16(b, 0) * (q.astype(mx.float32) - 16)


def _q5_1(b: mx.array) -> mx.array:
    q = _nibbles(b[..., 8:]) | _fifth_bits(b, 4)
    return _f16(b, 0) * q.astype(mx.float32) + _f16(b, 2)


def _q8_0(b: mx.array) -> mx.array:
    return _f16(b, 0) * mx.contiguous(b[..., 2:]).view(mx.int8).astype(mx.float32)


def _grouped(x: mx.array, groups: int) -> mx.array:
    return x.reshape(*x.shape[:-1], groups, -1)


def _two_bit(q: mx.array) -> mx.array:
    """64 bytes of 2-bit values -> 256 in order: each half of 128 reads its 32 bytes at shifts 0, 2, 4, 6."""
    halves = q.reshape(*q.shape[:-1], 2, 1, 32)
    shifts = mx.array([0, 2, 4, 6], dtype=mx.uint8).reshape(4, 1)
    return ((halves >> shifts) & 3).reshape(*q.shape[:-1], 256)


def _q2_k(b: mx.array) -> mx.array:
    scales = b[..., 0:16]
    d, dmin = _f16(b, 80), _f16(b, 82)
    q = _grouped(_two_bit(b[..., 16:80]).astype(mx.float32), 16)
    scale = (d * (scales & 15).astype(mx.float32))[..., None]
    low = (dmin * (scales >> 4).astype(mx.float32))[..., None]
    return (scale * q - low).reshape(*b.shape[:-1], 256)


def _q3_scales(s: mx.array) -> mx.array:
    """12 bytes -> 16 six-bit scales: low nibbles in bytes 0..7, the two high bits in bytes 8..11."""
    low = mx.concatenate([s[..., 0:8] & 15, s[..., 0:8] >> 4], axis=-1)
    high = mx.concatenate([(s[..., 8:12] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return (low | (high << 4)).astype(mx.float32) - 32


def _q3_k(b: mx.array) -> mx.array:
    d = _f16(b, 108)
    mask = b[..., 0:32][..., None, :] >> mx.arange(8, dtype=mx.uint8).reshape(8, 1)
    high = (mask & 1).reshape(*b.shape[:-1], 256).astype(mx.float32)
    q = _grouped(_two_bit(b[..., 32:96]).astype(mx.float32) - 4 * (1 - high), 16)
    return ((d * _q3_scales(b[..., 96:108]))[..., None] * q).reshape(*b.shape[:-1], 256)


def _k_scales(s: mx.array) -> tuple[mx.array, mx.array]:
    """12 bytes -> 8 scales and 8 mins of 6 bits (Q4_K, Q5_K)."""
    a, m, h = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scale = mx.concatenate([a & 63, (h & 15) | ((a >> 6) << 4)], axis=-1)
    low = mx.concatenate([m & 63, (h >> 4) | ((m >> 6) << 4)], axis=-1)
    return scale.astype(mx.float32), low.astype(mx.float32)


def _k_nibbles(q: mx.array) -> mx.array:
    """128 bytes -> 256 values: each 32 bytes give 32 low nibbles, then 32 high."""
    q = q.reshape(*q.shape[:-1], 4, 1, 32)
    return mx.concatenate([q & 15, q >> 4], axis=-2).reshape(*q.shape[:-3], 256)


def _k_affine(b: mx.array, q: mx.array) -> mx.array:
    """d * scale * q - dmin * min per 32 weights, from the 16-byte head of a Q4_K or Q5_K block."""
    scale, low = _k_scales(b[..., 4:16])
    values = _grouped(q.astype(mx.float32), 8)
    out = (_f16(b, 0) * scale)[..., None] * values - (_f16(b, 2) * low)[..., None]
    return out.reshape(*b.shape[:-1], 256)


def _q4_k(b: mx.array) -> mx.array:
    return _k_affine(b, _k_nibbles(b[..., 16:144]))


def _q5_k(b: mx.array) -> mx.array:
    high = b[..., 16:48][..., None, :] >> mx.arange(8, dtype=mx.uint8).reshape(8, 1)
    fifth = ((high & 1) << 4).reshape(*b.shape[:-1], 256)
    return _k_affine(b, _k_nibbles(b[..., 48:176]) | fifth)


def _q6_k(b: mx.array) -> mx.array:
    low = b[..., 0:128].reshape(*b.shape[:-1], 2, 64)
    nibbles = mx.concatenate([low & 15, low >> 4], axis=-1)
    high = b[..., 128:192].reshape(*b.shape[:-1], 2, 1, 32)
    shifts = mx.array([0, 2, 4, 6], dtype=mx.uint8).reshape(4, 1)
    two = ((high >> shifts) & 3).reshape(*b.shape[:-1], 2, 128)
    q = (nibbles | (two << 4)).reshape(*b.shape[:-1], 256).astype(mx.float32) - 32
    scale = _f16(b, 208) * mx.contiguous(b[..., 192:208]).view(mx.int8).astype(mx.float32)
    return (scale[..., None] * _grouped(q, 16)).reshape(*b.shape[:-1], 256)


def _iq4_nl(b: mx.array) -> mx.array:
    table = mx.array(IQ4_VALUES, dtype=mx.float32)
    return _f16(b, 0) * table[_nibbles(b[..., 2:])]


def _iq4_xs(b: mx.array) -> mx.array:
    table = mx.array(IQ4_VALUES, dtype=mx.float32)
    high = mx.contiguous(b[..., 2:4]).view(mx.uint16)
    two = ((high >> mx.arange(0, 16, 2, dtype=mx.uint16)) & 3).astype(mx.uint8)
    low = b[..., 4:8][..., None]
    four = mx.concatenate([low & 15, low >> 4], axis=-1).reshape(*b.shape[:-1], 8)
    scale = _f16(b, 0) * ((four | (two << 4)).astype(mx.float32) - 32)
    q = b[..., 8:136].reshape(*b.shape[:-1], 8, 16)
    return (scale[..., None] * table[_nibbles(q)]).reshape(*b.shape[:-1], 256)


def _mxfp4(b: mx.array) -> mx.array:
    table = mx.array(MXFP4_VALUES, dtype=mx.float32)
    e = b[..., 0:1].astype(mx.uint32)
    # Half of 2^(e - 127) as float32 bits; e < 2 gives a subnormal.
    bits = mx.where(e < 2, mx.array(0x00200000, dtype=mx.uint32) << e, (e - 1) << 23)
    return bits.view(mx.float32) * table[_nibbles(b[..., 1:])]


DEQUANT: dict[GGMLType, Callable[[mx.array], mx.array]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16_plain,
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.MXFP4: _mxfp4,
}


def dequantize(data: mx.array, kind: GGMLType) -> mx.array:
    """uint8 (..., row_bytes) -> float32 (..., row weights)."""
    info = QUANT_TABLE[kind]
    blocks = data.reshape(*data.shape[:-1], -1, info.type_size)
    return DEQUANT[kind](blocks).reshape(*data.shape[:-1], -1)
