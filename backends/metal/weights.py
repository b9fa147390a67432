"""Weights on the unified memory: the file's own bytes in MLX arrays, dequantised rows kept only where asked for."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from edgellm.backends.base import GGMLType, QTensor
from edgellm.backends.metal.affine import Affine, to_affine
from edgellm.backends.metal.dequant_ops import DEQUANT, dequantize
from edgellm.errors import UnsupportedModel

__all__ = ["DenseCache", "MetalWeight", "load_weight"]


class MetalWeight:
    """A weight as uint8 (*shape[:-1], row_bytes); 1-D tensors (norms, biases, sinks) as float32 in `dense`."""

    def __init__(self, name: str, kind: GGMLType, shape: tuple[int, ...], data: mx.array, dense: mx.array | None):
        self.name = name
        self.kind = kind
        self.shape = shape
        self.data = data
        self.dense = dense
        self.affine: Affine | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        held = [self.data, self.dense, *(self.affine[:3] if self.affine else ())]
        return sum(int(a.nbytes) for a in held if a is not None)

    def repack(self) -> None:
        """Replace the file's bytes by MLX's affine format."""
        self.affine = to_affine(self.data, self.kind)
        mx.eval(self.affine[:3])
        self.data = mx.zeros((0,), dtype=mx.uint8)


def load_weight(tensor: QTensor) -> MetalWeight:
    """Copy one tensor from the memory map; only this tensor's bytes exist twice, and only until the next one."""
    if tensor.type not in DEQUANT:
        raise UnsupportedModel(
            f"{tensor.name} has type {tensor.type.name}, which the metal backend does not run; use --backend cpu"
        )
    data = mx.array(np.ascontiguousarray(tensor.data))
    mx.eval(data)
    small = len(tensor.shape) == 1 or tensor.name.endswith(".bias")
    dense = dequantize(data, tensor.type).reshape(*tensor.shape) if small else None
    if dense is not None:
        mx.eval(dense)  # a lazy array belongs to this thread; steps run on the engine's
    return MetalWeight(tensor.name, tensor.type, tensor.shape, data, dense)


class DenseCache:
    """Dequantised weights up to `limit` bytes, so that plain ops need not unpack every step (CPU device, tests).

    The first weights asked for stay: a step walks all layers in order, where evicting the oldest would never hit."""

    def __init__(self, limit: int):
        self.limit = limit
        self._held: WeakKeyDictionary[MetalWeight, mx.array] = WeakKeyDictionary()

    def get(self, weight: MetalWeight) -> mx.array:
        """float32 array of weight.shape."""
        held = self._held.get(weight)
        if held is not None:
            return held
        dense = dequantize(weight.data, weight.kind).reshape(*weight.shape)
        size = 4 * math.prod(weight.shape)
        if sum(int(a.nbytes) for a in self._held.values()) + size <= self.limit:
            mx.eval(dense)
            self._held[weight] = dense
        return dense
