"""What `doctor --backend metal` runs, through the shim."""

from __future__ import annotations

import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")
from tests.metal.can_run import cannot_run  # noqa: E402

if reason := cannot_run():
    pytest.skip(reason, allow_module_level=True)

from edgellm.backends.metal.selftest import check_kernels  # noqa: E402
from tests.metal.harness import CpuKernel, maker  # noqa: E402

pytestmark = pytest.mark.thorough


def test_every_kernel_passes_its_own_check() -> None:
    checks = list(check_kernels(maker()))
    assert [c for c in checks if not c.passed] == []
    assert len(checks) == 15 * 5 + 3


def test_a_wrong_kernel_is_reported() -> None:
    def broken(**arguments) -> CpuKernel:
        arguments["source"] = arguments["source"].replace("acc[i] = 0.0f;", "acc[i] = 0.01f;")
        return CpuKernel(**arguments)

    checks = list(check_kernels(broken))
    assert {c.name.split()[0] for c in checks if not c.passed} == {"matvec", "norm"}


def test_a_kernel_that_does_not_compile_is_reported() -> None:
    def broken(**arguments) -> CpuKernel:
        arguments["source"] = "this is not Metal;"
        return CpuKernel(**arguments)

    check = next(check_kernels(broken))
    assert not check.passed
    assert isinstance(check.error, str)
    assert "BuildError" in check.error
