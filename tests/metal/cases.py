"""One product through the shipped dispatch and the shipped Metal text, compared with the gguf package's weights."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from edgellm.backends.metal.kernels import MAX_ROWS, MatmulKernels
from edgellm.backends.metal.products import Products
from edgellm.backends.metal.weights import MetalWeight
from edgellm.quants import GGMLType
from tests.metal.blocks import dequantized, nmse, random_weights
from tests.metal.harness import CpuKernel, maker

__all__ = ["LENGTHS", "check_product"]

LENGTHS = [256, 512, 768, 1280, 2048, 2560, 4096, 5120, 8192, 11008, 14336]
"""Row lengths of real models."""


def check_product(
    kind: GGMLType, k: int, n: int, m: int, made: list[CpuKernel], seed: int = 0, mode: str = "plain"
) -> None:
    """m rows of activations times n rows of k weights: normalised mean squared error at most 1e-10 where the kernel
    computes in float32, 1e-6 where weights become half tiles."""
    rng = np.random.default_rng(seed)
    raw, x = random_weights(kind, n, k, rng), rng.standard_normal((m, k)).astype(np.float32)
    weight = MetalWeight("w", kind, (n, k), mx.array(raw))
    (y,) = Products(MatmulKernels(maker(made, mode=mode)), None).linears(mx.array(x), [weight])
    error = nmse(np.array(y).astype(np.float64), x.astype(np.float64) @ dequantized(raw, kind).T)
    assert error <= (1e-10 if m <= MAX_ROWS else 1e-6), (kind.name, k, n, m, seed, error)
