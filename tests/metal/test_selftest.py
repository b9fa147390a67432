"""What `doctor --backend metal` runs, through the shim."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")
from tests.metal.can_run import cannot_run  # noqa: E402

if reason := cannot_run():
    pytest.skip(reason, allow_module_level=True)

from edgellm.backends.metal.choice import Choices  # noqa: E402
from edgellm.backends.metal.kernels import MatmulKernels  # noqa: E402
from edgellm.backends.metal.products import Products  # noqa: E402
from edgellm.backends.metal.selftest import check_kernels  # noqa: E402
from edgellm.backends.metal.weights import MetalWeight  # noqa: E402
from edgellm.quants import GGMLType  # noqa: E402
from tests.metal.blocks import dequantized, nmse, random_weights  # noqa: E402
from tests.metal.harness import CpuKernel, maker  # noqa: E402


@pytest.mark.thorough
def test_every_kernel_passes_its_own_check() -> None:
    checks = list(check_kernels(maker()))
    assert [c for c in checks if not c.passed] == []
    assert len(checks) == 15 * 5 + 3


@pytest.mark.thorough
def test_a_wrong_kernel_is_reported() -> None:
    def broken(**arguments) -> CpuKernel:
        arguments["source"] = arguments["source"].replace("acc[i] = 0.0f;", "acc[i] = 0.01f;")
        return CpuKernel(**arguments)

    checks = list(check_kernels(broken))
    assert {c.name.split()[0] for c in checks if not c.passed} == {"matvec", "norm"}


def test_a_type_whose_kernels_are_wrong_runs_on_plain_ops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a device (where `Choices` are kept) kernels are compared with plain ops before they are trusted, once."""
    checked: list[str] = []

    def half_broken(**arguments) -> CpuKernel:
        checked.append(arguments["name"])
        if arguments["name"] == "dequantize_q4_k":
            arguments["source"] = "this is not Metal;"
        return CpuKernel(**arguments)

    rng = np.random.default_rng(0)
    for again in (False, True):
        checked.clear()
        for kind in (GGMLType.Q4_K, GGMLType.Q6_K):
            raw, x = random_weights(kind, 5, 256, rng), rng.standard_normal((40, 256)).astype(np.float32)
            products = Products(MatmulKernels(half_broken), Choices("Apple M9", tmp_path))
            (y,) = products.linears(mx.array(x), [MetalWeight("w", kind, (5, 256), mx.array(raw))])
            exact = kind is GGMLType.Q4_K
            assert nmse(np.array(y), x @ dequantized(raw, kind).T) < (1e-10 if exact else 1e-6)
        assert set(checked) == ({"dequantize_q6_k"} if again else {*checked, "matvec_q4_k", "matvec_q6_k"})
        assert caplog.text.count("the Q4_K kernels are wrong") == 1 + again
    assert "Q6_K" not in caplog.text


def test_a_kernel_that_does_not_compile_is_reported() -> None:
    def broken(**arguments) -> CpuKernel:
        arguments["source"] = "this is not Metal;"
        return CpuKernel(**arguments)

    check = next(check_kernels(broken))
    assert not check.passed
    assert isinstance(check.error, str)
    assert "BuildError" in check.error
