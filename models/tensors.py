"""A file's tensors by name, checked when a model takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import Backend, QTensor, Weight
from edgellm.backends.dequant import dequantise
from edgellm.errors import UnsupportedModel
from edgellm.models.config import ModelConfig

__all__ = ["Tensors"]

IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tables a file may carry though its architecture or settings have no use for them."""


@dataclass
class Tensors:
    """Takes tensors from `source` under a name prefix and hands them to the backend, each once."""

    source: Mapping[str, QTensor]
    backend: Backend
    prefix: str = ""
    loaded: dict[str, Weight] = field(default_factory=dict)
    """Weights by full name, shared by all scopes: a tied output head is the embedding's weight."""

    def scope(self, prefix: str) -> Tensors:
        """The tensors whose names go on after `prefix`."""
        return replace(self, prefix=self.prefix + prefix)

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.source

    def find(self, name: str, *shape: int) -> QTensor:
        """The tensor as the file holds it. `shape` in numpy order (rows first).

        Raises UnsupportedModel when it is missing or has another shape: its name, expected and found.
        """
        full = self.prefix + name
        expected = " x ".join(map(str, shape))
        tensor = self.source.get(full)
        if tensor is None:
            raise UnsupportedModel(
                f"tensor {full} is missing from the file (expected shape {expected}){self._hint(name)}"
            )
        if _without_ones(tensor.shape) != _without_ones(shape):
            found = " x ".join(map(str, tensor.shape))
            raise UnsupportedModel(f"tensor {full} has shape {found}, expected {expected}")
        if 0 in shape:
            raise UnsupportedModel(f"tensor {full} is empty: its shape is {expected}")
        return QTensor(full, tensor.type, shape, tensor.data.reshape(*shape[:-1], -1))

    def _hint(self, name: str) -> str:
        """What else the file has in place of expert tensors."""
        old = "_exps" in name and name.replace("_exps", ".0") in self
        return "; it has one tensor per expert, a layout given up in 2024: convert the model again" if old else ""

    def weight(self, name: str, *shape: int) -> Weight:
        """The tensor, loaded."""
        tensor = self.find(name, *shape)
        full = self.prefix + name
        if full not in self.loaded:
            self.loaded[full] = self.backend.load(tensor)
        return self.loaded[full]

    def optional(self, name: str, *shape: int) -> Weight | None:
        """The tensor, loaded, or None when the file has none of that name."""
        return self.weight(name, *shape) if name in self else None

    def rows(self, name: str, sizes: tuple[int, ...], *row_shape: int) -> tuple[Weight, ...]:
        """A fused tensor's row ranges, each loaded as a weight of its own (views, no copies)."""
        tensor = self.find(name, sum(sizes), *row_shape)
        weights, start = [], 0
        for size in sizes:
            weights.append(self.backend.load(tensor.rows(start, start + size)))
            start += size
        self.loaded[self.prefix + name] = tuple(weights)
        return tuple(weights)

    def array(self, name: str, *shape: int) -> npt.NDArray[np.float32]:
        """A small table that is needed while the model is built, as float32."""
        tensor = self.find(name, *shape)
        self.loaded[self.prefix + name] = None
        return dequantise(tensor.data, tensor.type).astype(np.float32).reshape(shape)

    def check_all_used(self, config: ModelConfig) -> None:
        """Raise UnsupportedModel naming the first tensor no layer took: running without it would answer wrongly."""
        for name in self.source:
            if name not in self.loaded and name not in IGNORED and not config.skips(name):
                raise UnsupportedModel(
                    f"tensor {name} has no place in our {config.arch} architecture; the model is a variant of it"
                )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """GGUF does not tell (1, n) from (n,)."""
    first = next((i for i, n in enumerate(shape) if n != 1), len(shape) - 1)
    return tuple(shape[first:])
