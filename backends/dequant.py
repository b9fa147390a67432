"""Block formats to float32, one obvious vectorised function per ggml type.

Each function gets blocks as uint8 (n, type_size) and returns float32 (n, block_size), in the rounding order ggml uses
(scale products first, then times q), so the result is the same bit for bit. Layouts in words: `quants.QUANT_TABLE`.
The codebooks of the IQ types are constants of the `gguf` package, see `dequant_iq.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.errors import UnsupportedModel
from edgellm.quants import QUANT_TABLE, GGMLType

__all__ = ["bits", "dequantise", "f16", "nibbles"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""E2M1 values, doubled so that they are whole numbers."""
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def f16(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block: float32 (n, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def nibbles(data: Bytes, run: int) -> Bytes:
    """4-bit numbers (n, groups, run) from bytes (n, groups * run / 2): each group has its low halves first."""
    packed = data.reshape(len(data), -1, 1, run // 2)
    return np.concatenate([packed & 15, packed >> 4], axis=2).reshape(len(data), -1, run)


def bits(data: Bytes) -> Bytes:
    """Single bits (n, 8 * bytes), least significant first."""
    return np.unpackbits(data, axis=1, bitorder="little")


def _planes(data: Bytes, run: int, width: int) -> Bytes:
    """`width`-bit numbers (n, -1, run): runs of bytes hold the first `run` numbers in their lowest bits, and so on."""
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    planes = data.reshape(len(data), -1, 1, run) >> shifts & np.uint8((1 << width) - 1)
    return planes.reshape(len(data), -1, run)


def _q4_0(b: Bytes) -> Floats:
    return f16(b, 0) * (nibbles(b[:, 2:], 32)[:, 0].astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Floats:
    return f16(b, 0) * nibbles(b[:, 4:], 32)[:, 0].astype(np.float32) + f16(b, 2)


def _q5_0(b: Bytes) -> Floats:
    q = nibbles(b[:, 6:], 32)[:, 0] | bits(b[:, 2:6]) << 4
    return f16(b, 0) * (q.astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Floats:
    q = nibbles(b[:, 8:], 32)[:, 0] | bits(b[:, 4:8]) << 4
    return f16(b, 0) * q.astype(np.float32) + f16(b, 2)


def _q8_0(b: Bytes) -> Floats:
    return f16(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _q8_1(b: Bytes) -> Floats:
    d = np.ascontiguousarray(b[:, :4]).view(np.float32)
    return d * b[:, 8:].view(np.int8).astype(np.float32)


def _q8_k(b: Bytes) -> Floats:
    d = np.ascontiguousarray(b[:, :4]).view(np.float32)
    return d * b[:, 4:260].view(np.int8).astype(np.float32)


def _q1_0(b: Bytes) -> Floats:
    return f16(b, 0) * (bits(b[:, 2:]).astype(np.float32) * 2 - 1)


def _q2_0(b: Bytes) -> Floats:
    q = (b[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    return f16(b, 0) * (q.reshape(len(b), 64).astype(np.float32) - 1)


def _q2_k(b: Bytes) -> Floats:
    d, dmin = f16(b, 80), f16(b, 82)
    scale = d * (b[:, :16] & 15).astype(np.float32)
    minimum = dmin * (b[:, :16] >> 4).astype(np.float32)
    q = _planes(b[:, 16:80], 32, 2).reshape(len(b), 16, 16).astype(np.float32)
    return (scale[:, :, None] * q - minimum[:, :, None]).reshape(len(b), 256)


def _q3_k(b: Bytes) -> Floats:
    packed = b[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = _planes(packed[:, 8:], 4, 2).reshape(len(b), 16)
    scale = f16(b, 108) * ((low | high << 4).astype(np.float32) - 32)
    has_high_bit = _planes(b[:, :32], 32, 1).astype(np.float32)
    q = _planes(b[:, 32:96], 32, 2).astype(np.float32) - 4 * (1 - has_high_bit)
    weights: Floats = scale[:, :, None] * q.reshape(len(b), 16, 16)
    return weights.reshape(len(b), 256)


def _scale_min(b: Bytes) -> tuple[Floats, Floats]:
    """The eight products d * scale and dmin * min of a Q4_K or Q5_K block: float32 (n, 8, 1) each.

    6 bits each: numbers 0..3 lie in bytes 0..3 (scales) and 4..7 (mins); numbers 4..7 have their low halves in
    bytes 8..11 and their two high bits on top of bytes 0..7.
    """
    first, second, halves = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate([first & 63, halves & 15 | first >> 2 & 0x30], axis=1)
    minimum = np.concatenate([second & 63, halves >> 4 | second >> 2 & 0x30], axis=1)
    return (f16(b, 0) * scale.astype(np.float32))[..., None], (f16(b, 2) * minimum.astype(np.float32))[..., None]


def _q4_k(b: Bytes) -> Floats:
    scale, minimum = _scale_min(b)
    q = _planes(b[:, 16:144], 32, 4).astype(np.float32)
    return (scale * q - minimum).reshape(len(b), 256)


def _q5_k(b: Bytes) -> Floats:
    scale, minimum = _scale_min(b)
    q = _planes(b[:, 48:176], 32, 4) | _planes(b[:, 16:48], 32, 1) << 4
    return (scale * q.astype(np.float32) - minimum).reshape(len(b), 256)


def _q6_k(b: Bytes) -> Floats:
    low = _planes(b[:, :128], 64, 4).reshape(len(b), 8, 32)
    q = (low | _planes(b[:, 128:192], 32, 2) << 4).astype(np.float32) - 32
    scale = f16(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[:, :, None] * q.reshape(len(b), 16, 16)).reshape(len(b), 256)


def _tq1_0(b: Bytes) -> Floats:
    """Five base-3 digits per byte: digit i is the top of (byte * 3^i mod 256) * 3."""

    def digits(data: Bytes, n: int) -> Bytes:
        powers = np.array([3**i for i in range(n)], np.uint8).reshape(1, n, 1)
        return (data[:, None, :] * powers).reshape(len(data), -1)

    q = np.concatenate([digits(b[:, :32], 5), digits(b[:, 32:48], 5), digits(b[:, 48:52], 4)], axis=1)
    return f16(b, 52) * ((q.astype(np.uint16) * 3 >> 8).astype(np.float32) - 1)


def _tq2_0(b: Bytes) -> Floats:
    q = _planes(b[:, :64], 32, 2).reshape(len(b), 256)
    return f16(b, 64) * (q.astype(np.float32) - 1)


def _mxfp4(b: Bytes) -> Floats:
    """2^(e - 128) (half of e8m0, as the value table is doubled); e of 0 and 1 are float32 denormals."""
    e = b[:, :1].astype(np.uint32)
    half = np.where(e < 2, np.uint32(0x00200000) << e, (e - 1) << np.uint32(23)).view(np.float32)
    return half * FP4[nibbles(b[:, 1:], 32)[:, 0]]


def _nvfp4(b: Bytes) -> Floats:
    """Four unsigned E4M3 scales (halved, as the value table is doubled), then four runs of 16."""
    exponent, mantissa = (b[:, :4] >> 3 & 15).astype(np.int32), (b[:, :4] & 7).astype(np.float32)
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))
    scale = np.where(b[:, :4] == 0x7F, 0, value * 0.5).astype(np.float32)
    return (scale[:, :, None] * FP4[nibbles(b[:, 4:], 16)]).reshape(len(b), 64)


def _iq4_nl(b: Bytes) -> Floats:
    return f16(b, 0) * IQ4_VALUES[nibbles(b[:, 2:], 32)[:, 0]]


def _iq4_xs(b: Bytes) -> Floats:
    high = _planes(b[:, 2:4], 1, 2).reshape(len(b), 8)
    low = nibbles(b[:, 4:8], 2).reshape(len(b), 8)
    scale = f16(b, 0) * ((low | high << 4).astype(np.float32) - 32)
    return (scale[:, :, None] * IQ4_VALUES[nibbles(b[:, 8:], 32)]).reshape(len(b), 256)


def _bf16(b: Bytes) -> Floats:
    return (np.ascontiguousarray(b).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _plain(dtype: type[Any]) -> Callable[[Bytes], Floats]:
    return lambda b: np.ascontiguousarray(b).view(dtype).astype(np.float32)


_FUNCTIONS: dict[GGMLType, Callable[[Bytes], Floats]] = {
    GGMLType.F32: _plain(np.float32),
    GGMLType.F16: _plain(np.float16),
    GGMLType.F64: _plain(np.float64),
    GGMLType.I8: _plain(np.int8),
    GGMLType.I16: _plain(np.int16),
    GGMLType.I32: _plain(np.int32),
    GGMLType.I64: _plain(np.int64),
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q8_1: _q8_1,
    GGMLType.Q8_K: _q8_k,
    GGMLType.Q1_0: _q1_0,
    GGMLType.Q2_0: _q2_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.TQ1_0: _tq1_0,
    GGMLType.TQ2_0: _tq2_0,
    GGMLType.MXFP4: _mxfp4,
    GGMLType.NVFP4: _nvfp4,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
}


def dequantise(data: Bytes, type: GGMLType) -> Floats:
    """Weights of uint8 rows (..., row_bytes) as float32 (..., row_length).

    Raises UnsupportedModel for a type without a definition.
    """
    function = _FUNCTIONS.get(type)
    if function is None:
        from edgellm.backends.dequant_iq import FUNCTIONS

        function = FUNCTIONS.get(type)
    if function is None:
        raise UnsupportedModel(
            f"weights of type {type.name} cannot be computed with; convert the model to another type"
        )
    info = QUANT_TABLE[type]
    n_blocks = data.shape[-1] // info.type_size
    blocks = np.ascontiguousarray(data).reshape(-1, info.type_size)
    return function(blocks).reshape(*data.shape[:-1], n_blocks * info.block_size)
