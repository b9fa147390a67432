"""Random GGUF blocks with sane scales, and what the gguf package says they mean."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import quants

from edgellm.quants import QUANT_TABLE, GGMLType

F16_AT = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
"""Byte offsets of the float16 scales in a block."""


def random_weights(kind: GGMLType, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 (n, row_bytes): any bits in the quants and packed scales, small finite float16 scales."""
    info = QUANT_TABLE[kind]
    if kind.name not in F16_AT:
        values = rng.standard_normal((n, k)).astype(np.float32)
        return quants.quantize(values, gguf.GGMLQuantizationType(int(kind))).view(np.uint8).reshape(n, -1)
    raw = rng.integers(0, 256, (n, k // info.block_size, info.type_size), dtype=np.uint8)
    for at in F16_AT[kind.name]:
        scale = (rng.standard_normal((n, raw.shape[1], 1)) * 0.05).astype(np.float16)
        raw[:, :, at : at + 2] = scale.view(np.uint8).reshape(n, -1, 2)
    if kind is GGMLType.MXFP4:
        raw[:, :, 0] = rng.integers(118, 130, raw.shape[:2])
    return raw.reshape(n, -1)


def dequantized(raw: np.ndarray, kind: GGMLType) -> np.ndarray:
    """float64 weights by the gguf package."""
    return quants.dequantize(raw, gguf.GGMLQuantizationType(int(kind))).astype(np.float64)


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    """Normalised mean squared error."""
    return float(((got - expected) ** 2).mean() / (expected**2).mean())
