"""Weights of types without a kernel here (IQ1, IQ2, IQ3, TQ, NVFP4, Q1_0, Q2_0), kept in memory as Q8_0.

Such a file runs, at the price of memory (34 bytes for 32 weights) and of a while at load. Eight bits next to the
largest weight of 32 add less to what these types have lost (one to four bits) than the activations' own eight bits do.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edgellm.backends.dequant import dequantise
from edgellm.quants import QUANT_TABLE, GGMLType, QTensor

__all__ = ["as_q8_0", "q8_0_bytes"]

BLOCK = 32
PIECE = 1 << 18
"""Weights that are taken apart at once: their float32 values stay in the cache and never all lie in memory together."""


def q8_0_bytes(tensor: QTensor) -> int:
    """What `as_q8_0` takes."""
    return math.prod(tensor.shape) // BLOCK * QUANT_TABLE[GGMLType.Q8_0].type_size


def as_q8_0(tensor: QTensor) -> QTensor:
    """The same weights as blocks of a float16 scale and 32 int8. The width must be a multiple of 32."""
    width, n_rows = tensor.shape[-1], math.prod(tensor.shape[:-1])
    source = tensor.data.reshape(n_rows, -1)
    out = np.empty((n_rows, width // BLOCK, QUANT_TABLE[GGMLType.Q8_0].type_size), np.uint8)
    step = max(PIECE // width, 1)
    for start in range(0, n_rows, step):
        _pack(source[start : start + step], tensor.type, out[start : start + step])
    return QTensor(tensor.name, GGMLType.Q8_0, tensor.shape, out.reshape(*tensor.shape[:-1], -1))


def _pack(source: npt.NDArray[np.uint8], kind: GGMLType, out: npt.NDArray[np.uint8]) -> None:
    """Rows of another type as Q8_0. A block with a NaN or an infinite weight gets a NaN or infinite scale."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.asarray(dequantise(source, kind), np.float32).reshape(len(out), -1, BLOCK)
        scale = (np.abs(values).max(axis=-1, keepdims=True) / 127).astype(np.float16)
        # Divided by the scale as it is stored: what float16 rounds off it (much, where it is tiny) does no harm.
        codes = np.rint(values / np.maximum(scale.astype(np.float32), 1e-30)).clip(-127, 127)
        out[..., :2] = scale.view(np.uint8)
        out[..., 2:] = codes.astype(np.int8).view(np.uint8)
