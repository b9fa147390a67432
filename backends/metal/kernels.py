"""Launch of the Metal matmul kernels: matvec for 1..8 rows, expert matvec, dequantise for longer prompts.

A kernel's text is `kernels/types_<type>.metal` (how a block unpacks) and, for products, `kernels/rows.metal` as header,
and `kernels/<name>.metal` as body.
`make` is `mx.fast.metal_kernel`; the tests pass a stand-in of the same signature that runs the text on a CPU.
Plain-ops twin of all three: `dequant_ops.dequantize` and a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any

import mlx.core as mx

from edgellm.backends.base import GGMLType
from edgellm.backends.metal.dequant_ops import DEQUANT
from edgellm.quants import QUANT_TABLE

__all__ = ["KERNEL_TYPES", "MATRICES", "MAX_ROWS", "MatmulKernels", "kernel_text"]

MAX_ROWS = 8
"""Most rows of activations one matvec launch takes."""
MATRICES = 3
"""Most matrices of one launch."""
KERNEL_TYPES = frozenset(DEQUANT) - {GGMLType.F32}
ROWS = 2
"""Weight rows per simdgroup: two share the loads of x; more would not leave enough registers (rows.metal)."""
THREADS = 64
"""Threads per threadgroup: two simdgroups, within the limits of every Apple GPU since M1."""


@cache
def kernel_text(name: str) -> str:
    """The text of `kernels/<name>.metal`."""
    return (resources.files("edgellm.backends.metal") / "kernels" / f"{name}.metal").read_text()


class MatmulKernels:
    """The compiled kernels of one device, made on first use per type."""

    def __init__(self, make: Callable[..., Any] | None = None):
        self._make = make or mx.fast.metal_kernel
        self._made: dict[tuple[str, GGMLType], Any] = {}

    def _kernel(self, name: str, kind: GGMLType, inputs: list[str], output: str) -> Any:
        key = (name, kind)
        if key not in self._made:
            parts = [f"types_{kind.name.lower()}"] + ["rows"] * ("matvec" in name)
            self._made[key] = self._make(
                name=f"{name}_{kind.name.lower()}",
                input_names=inputs,
                output_names=[output],
                source=kernel_text(name),
                header="".join(map(kernel_text, parts)),
            )
        return self._made[key]

    @staticmethod
    def fits(kind: GGMLType, k: int) -> bool:
        """Whether rows of k weights can be read by these kernels."""
        return kind in KERNEL_TYPES and k % max(32, QUANT_TABLE[kind].block_size) == 0

    def matvec(self, data: mx.array, kind: GGMLType, x: mx.array) -> mx.array:
        """data uint8 (n, row_bytes), x float32 (m, k) with m <= 8 -> float32 (m, n)."""
        return self.matvecs([data], kind, x)[0]

    def matvecs(
        self, matrices: Sequence[mx.array], kind: GGMLType, x: mx.array, norm: mx.array | None = None, eps: float = 0.0
    ) -> list[mx.array]:
        """One to three matrices uint8 (n_i, row_bytes) of one type in one launch: float32 (m, n_i) each. With `norm`
        (k,) the products of x / sqrt(mean(x^2) + eps) * norm."""
        m, k = x.shape
        sizes = [int(w.shape[0]) for w in matrices]
        kernel = self._kernel("matvec", kind, ["w0", "w1", "w2", "x", "gain", "eps"], "y")
        flat = [w.reshape(-1) for w in matrices]
        x = x.reshape(-1)
        n0, n1, n2 = sizes + [0] * (3 - len(sizes))
        y = kernel(
            inputs=[*flat, *[flat[0]] * (3 - len(flat)), x, x if norm is None else norm, mx.array([eps])],
            template=[
                *[("K", k), ("M", m), ("N0", n0), ("N1", n1), ("N2", n2)],
                *[("ROWS", ROWS), ("NORM", norm is not None)],
            ],
            grid=(32 * sum(-(-n // ROWS) for n in sizes), 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(m * sum(sizes),)],
            output_dtypes=[mx.float32],
        )[0]
        ends = [m * sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [y[end - m * n : end].reshape(m, n) for end, n in zip(ends, sizes, strict=True)]

    def expert_matvec(self, data: mx.array, kind: GGMLType, x: mx.array, ids: mx.array) -> mx.array:
        """data uint8 (n_experts, n, row_bytes), x (t, k) or (t, n_used, k), ids (t, n_used) -> (t, n_used, n)."""
        t, n_used = ids.shape
        n, k = data.shape[1], x.shape[-1]
        kernel = self._kernel("expert_matvec", kind, ["w", "x", "ids"], "y")
        return kernel(
            inputs=[data.reshape(-1), x.reshape(-1), ids.reshape(-1).astype(mx.uint32)],
            template=[("K", k), ("N", n), ("SHARE", n_used if x.ndim == 2 else 1), ("ROWS", ROWS)],
            grid=(32 * -(-n // ROWS), t * n_used, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(t, n_used, n)],
            output_dtypes=[mx.float32],
        )[0]

    def dequantize_half(self, data: mx.array, kind: GGMLType, k: int) -> mx.array:
        """data uint8 (n, row_bytes) -> float16 (n, k)."""
        n = data.shape[0]
        kernel = self._kernel("dequantize", kind, ["w"], "out")
        return kernel(
            inputs=[data.reshape(-1)],
            template=[("K", k), ("N", n)],
            grid=(n * k // 32, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(n, k)],
            output_dtypes=[mx.float16],
        )[0]
