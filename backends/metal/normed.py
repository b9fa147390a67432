"""An RMS norm that waits: a product of few rows computes it itself (`kernels/matvec.metal`, NORM), and whatever else
asks gets the normed rows."""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx

__all__ = ["Normed", "plain"]


class Normed:
    """x / sqrt(mean(x^2) + eps) * gain for x float32 (m, k) and gain float32 (k,)."""

    def __init__(self, x: mx.array, gain: mx.array, eps: float):
        self.x, self.gain, self.eps = x, gain, eps

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return tuple(self.x.shape)

    @cached_property
    def value(self) -> mx.array:
        """The normed rows."""
        return mx.fast.rms_norm(self.x, self.gain, self.eps)

    def reshape(self, *shape: int) -> mx.array:
        """The normed rows in another shape."""
        return self.value.reshape(*shape)


def plain(x: mx.array | Normed) -> mx.array:
    """The array itself."""
    return x.value if isinstance(x, Normed) else x
