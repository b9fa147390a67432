"""Weights on the unified memory: the file's own bytes in MLX arrays, dequantised rows kept only where asked for."""

from __future__ import annotations

import math
import mmap
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgellm.backends.base import GGMLType, QTensor
from edgellm.backends.metal.affine import Affine, to_affine
from edgellm.backends.metal.dequant_ops import DEQUANT, dequantize
from edgellm.errors import UnsupportedModel

__all__ = ["DenseCache", "MetalWeight", "load_weight"]


class MetalWeight:
    """A weight as uint8 (*shape[:-1], row_bytes) in one of three places: `data` on the device, `affine` on the device
    in MLX's format, or `mapped`, the file's memory map (a layer that does not fit). 1-D tensors and biases are also
    held as float32 in `dense`."""

    def __init__(
        self,
        name: str,
        kind: GGMLType,
        shape: tuple[int, ...],
        data: mx.array | None,
        dense: mx.array | None = None,
        mapped: npt.NDArray[np.uint8] | None = None,
    ):
        self.name = name
        self.kind = kind
        self.shape = shape
        self.data = data
        self.dense = dense
        self.mapped = mapped
        self.affine: Affine | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        held = [self.data, self.dense, *(self.affine[:3] if self.affine else ())]
        return sum(int(a.nbytes) for a in held if a is not None)

    @property
    def device(self) -> mx.array:
        """The file's bytes on the device; of a mapped weight a copy that lives as long as its user holds it."""
        if self.data is not None:
            return self.data
        if self.mapped is None:
            raise RuntimeError(f"{self.name} was repacked and has no blocks any more")
        data = mx.array(self.mapped)
        _let_go(self.mapped)
        return data

    def rows(self, ids: npt.NDArray[np.int32], device_ids: mx.array) -> mx.array:
        """Some rows of a table, uint8 (len(ids), row_bytes)."""
        return mx.array(self.mapped[ids]) if self.mapped is not None else self.device[device_ids]

    def packed(self) -> Affine:
        """The weight in MLX's affine format."""
        affine = to_affine(self.device, self.kind)
        mx.eval(*affine[:3])
        return affine

    def repack(self, affine: Affine) -> None:
        """Replace the file's bytes by MLX's affine format."""
        self.affine, self.data = affine, None


def load_weight(tensor: QTensor, mapped: bool = False) -> MetalWeight:
    """Copy one tensor from the memory map; only this tensor's bytes exist twice, and only until the next one. With
    `mapped` it stays in the map."""
    if tensor.type not in DEQUANT:
        raise UnsupportedModel(
            f"{tensor.name} has type {tensor.type.name}, which the metal backend does not run; use --backend cpu"
        )
    if mapped:
        return MetalWeight(tensor.name, tensor.type, tensor.shape, None, mapped=tensor.data)
    data = mx.array(np.ascontiguousarray(tensor.data))
    mx.eval(data)
    small = len(tensor.shape) == 1 or tensor.name.endswith(".bias")
    dense = dequantize(data, tensor.type).reshape(*tensor.shape) if small else None
    if dense is not None:
        mx.eval(dense)  # a lazy array belongs to this thread; steps run on the engine's
    _let_go(tensor.data)
    return MetalWeight(tensor.name, tensor.type, tensor.shape, data, dense)


def _let_go(view: npt.NDArray[np.uint8]) -> None:
    """Tell the system that these pages of a memory map are not needed now, or they would count as ours beside the
    copy. Reading them again later is fine."""
    base: object = view
    while isinstance(base, np.ndarray):
        base = base.base
    source = base.obj if isinstance(base, memoryview) else base
    if not isinstance(source, mmap.mmap) or not hasattr(source, "madvise"):
        return
    start = view.ctypes.data - np.frombuffer(source, np.uint8).ctypes.data
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        source.madvise(mmap.MADV_DONTNEED, first, end - first)


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
        dense = dequantize(weight.device, weight.kind).reshape(*weight.shape)
        size = 4 * math.prod(weight.shape)
        if weight.mapped is None and sum(int(a.nbytes) for a in self._held.values()) + size <= self.limit:
            mx.eval(dense)
            self._held[weight] = dense
        return dense
