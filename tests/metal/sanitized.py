"""Every kernel under AddressSanitizer and UBSan: `test_sanitizers.py` starts this in a process of its own, because the
sanitizer must be loaded before Python. Arguments: types, none for all. Prints one line per case; with `--planted` it
reads past a buffer's end."""

from __future__ import annotations

import sys

import mlx.core as mx
import numpy as np

from edgellm.backends.metal.attention_kernels import AttentionKernels
from edgellm.backends.metal.kernels import KERNEL_TYPES, MatmulKernels
from edgellm.backends.metal.selftest import attention_case
from edgellm.backends.metal.step import Step
from edgellm.quants import GGMLType
from tests.metal.blocks import random_weights
from tests.metal.cases import check_product
from tests.metal.harness import CpuKernel, maker


def products(kind: GGMLType, made: list[CpuKernel]) -> None:
    for k, n, m in ((512, 3, 1), (256, 5, 8), (256, 3, 33)):
        check_product(kind, k, n, m, made, mode="asan")
    rng = np.random.default_rng(0)
    raw = mx.array(np.stack([random_weights(kind, 3, 256, rng) for _ in range(4)]))
    x = mx.array(rng.standard_normal((2, 256)).astype(np.float32))
    mx.eval(MatmulKernels(maker(made, mode="asan")).expert_matvec(raw, kind, x, mx.array([[3, 0], [1, 1]])))


def attention(kv_type: str, made: list[CpuKernel]) -> None:
    q, kv, batch, spec = attention_case(kv_type, np.random.default_rng(0))
    mx.eval(AttentionKernels(maker(made, mode="asan"))(q, kv, Step(batch), spec))


def planted(made: list[CpuKernel]) -> None:
    """The row after the last one is read."""

    def make(header: str, **arguments) -> CpuKernel:
        return maker(made, mode="asan")(header=header.replace("min(uint(r), rows - 1)", "uint(r)"), **arguments)

    raw = mx.array(random_weights(GGMLType.Q4_K, 5, 256, np.random.default_rng(0)))
    mx.eval(MatmulKernels(make).matvec(raw, GGMLType.Q4_K, mx.ones((1, 256))))


def main() -> None:
    made: list[CpuKernel] = []
    if "--planted" in sys.argv:
        planted(made)
        return
    for kind in [GGMLType[name] for name in sys.argv[1:]] or sorted(KERNEL_TYPES):
        products(kind, made)
        print("ok", kind.name)
    for kv_type in ("f32", "f16", "q8_0"):
        attention(kv_type, made)
        print("ok attention", kv_type)
    findings = [finding for kernel in made for finding in kernel.findings]
    sys.exit("\n".join(findings) or None)


if __name__ == "__main__":
    main()
