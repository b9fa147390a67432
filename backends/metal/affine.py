"""Block types of 4 and 8 bits in MLX's own affine format (group 32): weight = scale * q + bias, exact in float32.

Q4_K, Q4_0, Q4_1 and Q8_0 fit: scale d * sc, bias -dmin * m (or -8 d, m, -128 d). With float32 scales and biases the
copy takes 6 or 10 bits a weight; it replaces the file's bytes on the device, and is chosen only where `choice.py`
measures it faster than the kernels that read blocks as they lie."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from edgellm.backends.base import GGMLType
from edgellm.quants import QUANT_TABLE

__all__ = ["AFFINE_TYPES", "Affine", "affine_product", "to_affine"]

GROUP = 32
AFFINE_TYPES = {GGMLType.Q4_0: 4, GGMLType.Q4_1: 4, GGMLType.Q4_K: 4, GGMLType.Q8_0: 8}
"""Bits per weight in MLX's packing."""


class Affine(NamedTuple):
    """Packed weights uint32 (n, k * bits / 32); scales and biases float32 (n, k / 32)."""

    packed: mx.array
    scales: mx.array
    biases: mx.array
    bits: int


def to_affine(data: mx.array, kind: GGMLType) -> Affine:
    """uint8 (n, row_bytes) of an affine type, repacked."""
    info = QUANT_TABLE[kind]
    blocks = data.reshape(data.shape[0], -1, info.type_size)
    q, scales, biases = _PARTS[kind](blocks)
    n = data.shape[0]
    return Affine(
        _pack(q.reshape(n, -1), AFFINE_TYPES[kind]), scales.reshape(n, -1), biases.reshape(n, -1), AFFINE_TYPES[kind]
    )


def affine_product(x: mx.array, weight: Affine) -> mx.array:
    """x float32 (m, k) -> float32 (m, n) through MLX's quantised matmul."""
    packed, scales, biases, bits = weight
    return mx.quantized_matmul(x, packed, scales, biases, transpose=True, group_size=GROUP, bits=bits)


def _pack(q: mx.array, bits: int) -> mx.array:
    """uint8 values in order -> uint32 words, first value in the lowest bits."""
    per = 32 // bits
    words = q.reshape(q.shape[0], -1, per).astype(mx.uint32)
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    return mx.sum(words << shifts, axis=-1).astype(mx.uint32)


def _half(b: mx.array, at: int) -> mx.array:
    return mx.contiguous(b[..., at : at + 2]).view(mx.float16).astype(mx.float32)


def _nibbles(q: mx.array) -> mx.array:
    return mx.concatenate([q & 15, q >> 4], axis=-1)


def _q4_0(b: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    d = _half(b, 0)
    return _nibbles(b[..., 2:]), d, -8 * d


def _q4_1(b: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    return _nibbles(b[..., 4:]), _half(b, 0), _half(b, 2)


def _q8_0(b: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    d = _half(b, 0)
    return b[..., 2:] ^ 128, d, -128 * d  # two's complement with the sign bit flipped is the value + 128


def _q4_k(b: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    a, m, h = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = mx.concatenate([a & 63, (h & 15) | ((a >> 6) << 4)], axis=-1).astype(mx.float32)
    low = mx.concatenate([m & 63, (h >> 4) | ((m >> 6) << 4)], axis=-1).astype(mx.float32)
    q = b[..., 16:].reshape(*b.shape[:-1], 4, 1, 32)
    q = mx.concatenate([q & 15, q >> 4], axis=-2)
    return q, _half(b, 0) * scale, -(_half(b, 2) * low)


_PARTS = {GGMLType.Q4_0: _q4_0, GGMLType.Q4_1: _q4_1, GGMLType.Q8_0: _q8_0, GGMLType.Q4_K: _q4_k}
