"""The IQ block formats to float32: eight (or four) weights at a time are looked up in a codebook.

The codebooks are the `gguf` package's constants (`gguf.quants`), read when one is first needed. Functions as in
`dequant.py`: uint8 (n, type_size) -> float32 (n, 256).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from edgellm.backends.dequant import bits, f16, nibbles
from edgellm.quants import GGMLType

__all__ = ["FUNCTIONS"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]


@cache
def _codebook(name: str) -> Floats:
    """float32 (entries, 8 or 4) of one type."""
    import gguf.quants

    traits = getattr(gguf.quants, name)
    traits.init_grid()
    grid: Floats = traits.grid.reshape(traits.grid_shape).astype(np.float32)
    return grid


@cache
def _sign_table() -> Floats:
    """+1 or -1 for each of 128 sign codes: float32 (128, 8). The eighth sign makes the count of minuses even."""
    codes = np.arange(128, dtype=np.uint8)[:, None]
    seven = bits(codes)[:, :7]
    eight = np.concatenate([seven, seven.sum(axis=1, keepdims=True, dtype=np.uint8) & 1], axis=1)
    return 1 - 2 * eight.astype(np.float32)


def _u16(data: Bytes) -> Words:
    return np.ascontiguousarray(data).view(np.uint16).astype(np.uint32)


def _u32(data: Bytes) -> Words:
    return np.ascontiguousarray(data).view(np.uint32)


def _fields(words: Words, starts: tuple[int, ...], width: int) -> Words:
    """Bit fields of each word: (n, words, len(starts))."""
    return words[..., None] >> np.array(starts, np.uint32) & np.uint32((1 << width) - 1)


def _signs(data: Bytes, run: int) -> Floats:
    """Explicit sign bits: float32 (n, -1, run)."""
    return (1 - 2 * bits(data).astype(np.float32)).reshape(len(data), -1, run)


def _scaled(scale: Floats, values: Floats) -> Floats:
    """scale (n, groups) times values, whose 256 weights per block fall into equal groups."""
    n, groups = scale.shape
    return (scale[:, :, None] * values.reshape(n, groups, -1)).reshape(n, 256)


def _iq2_xxs(b: Bytes) -> Floats:
    words = _u32(b[:, 2:]).reshape(len(b), 8, 2)
    scale = f16(b, 0) * (np.float32(0.5) + (words[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    grid = _codebook("IQ2_XXS")[_fields(words[..., 0], (0, 8, 16, 24), 8)]
    signs = _sign_table()[_fields(words[..., 1], (0, 7, 14, 21), 7)]
    return _scaled(scale, grid * signs)


def _iq2_xs(b: Bytes) -> Floats:
    codes = _u16(b[:, 2:66])
    scale = f16(b, 0) * (np.float32(0.5) + nibbles(b[:, 66:], 2).reshape(len(b), 16)) * np.float32(0.25)
    return _scaled(scale, _codebook("IQ2_XS")[codes & 511] * _sign_table()[codes >> 9])


def _iq2_s(b: Bytes) -> Floats:
    high = _fields(b[:, 66:74].astype(np.uint32), (0, 2, 4, 6), 2).reshape(len(b), 32)
    scale = f16(b, 0) * (np.float32(0.5) + nibbles(b[:, 74:], 2).reshape(len(b), 16)) * np.float32(0.25)
    return _scaled(scale, _codebook("IQ2_S")[b[:, 2:34] | high << 8] * _signs(b[:, 34:66], 8))


def _iq3_xxs(b: Bytes) -> Floats:
    words = _u32(b[:, 66:98])
    scale = f16(b, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    signs = _sign_table()[_fields(words, (0, 7, 14, 21), 7)]
    return _scaled(scale, _codebook("IQ3_XXS")[b[:, 2:66]].reshape(signs.shape) * signs)


def _iq3_s(b: Bytes) -> Floats:
    codes = b[:, 2:66].astype(np.uint32) | bits(b[:, 66:74]).astype(np.uint32) << 8
    scale = f16(b, 0) * (1 + 2 * nibbles(b[:, 106:], 2).reshape(len(b), 8).astype(np.float32))
    return _scaled(scale, _codebook("IQ3_S")[codes] * _signs(b[:, 74:106], 4))


def _iq1_s(b: Bytes) -> Floats:
    head = _u16(b[:, 34:50])
    scale = f16(b, 0) * (2 * (head >> 12 & 7) + 1).astype(np.float32)
    shift = np.where(head >> 15, np.float32(-0.125), np.float32(0.125))
    codes = b[:, 2:34] | _fields(head, (0, 3, 6, 9), 3).reshape(len(b), 32) << 8
    grid = _codebook("IQ1_S")[codes].reshape(len(b), 8, 32)
    return _scaled(scale, grid + shift[:, :, None])


def _iq1_m(b: Bytes) -> Floats:
    """The float16 scale is spread over the top four bits of the four scale words."""
    words = _u16(b[:, 48:56])
    top = words >> 12
    d = (top[:, 0] | top[:, 1] << 4 | top[:, 2] << 8 | top[:, 3] << 12).astype(np.uint16).view(np.float16)
    scale = d.astype(np.float32)[:, None] * (2 * _fields(words, (0, 3, 6, 9), 3).reshape(len(b), 16) + 1)
    head = nibbles(b[:, 32:48], 2).reshape(len(b), 32).astype(np.uint32)
    shift = np.where(head & 8, np.float32(-0.125), np.float32(0.125))
    grid = _codebook("IQ1_S")[b[:, :32] | (head & 7) << 8]
    return _scaled(scale.astype(np.float32), grid + shift[:, :, None])


FUNCTIONS: dict[GGMLType, Callable[[Bytes], Floats]] = {
    GGMLType.IQ2_XXS: _iq2_xxs,
    GGMLType.IQ2_XS: _iq2_xs,
    GGMLType.IQ2_S: _iq2_s,
    GGMLType.IQ3_XXS: _iq3_xxs,
    GGMLType.IQ3_S: _iq3_s,
    GGMLType.IQ1_S: _iq1_s,
    GGMLType.IQ1_M: _iq1_m,
}
