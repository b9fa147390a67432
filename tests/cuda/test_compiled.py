"""What NVIDIA's compiler makes of every kernel at the shapes of an 8B model, without a GPU: see launches.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from edgellm.quants import QUANT_TABLE, GGMLType
from tests.support.goldens import ROOT

if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") in ("", "0"):
    pytest.skip(
        "CUDA tests run when asked for: NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/cuda", allow_module_level=True
    )
pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install 'edgellm[cuda]')")

CARDS = [80, pytest.param(75, marks=pytest.mark.slow), pytest.param(90, marks=pytest.mark.slow)]
"""Compute capabilities: Ampere, Turing (the oldest that CUDA 13 supports), Hopper."""
BLOCK_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]


@cache
def recorded(*options: str) -> Any:
    """What launches.py prints, from a process without the simulator."""
    real = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    command = [sys.executable, "-m", "tests.cuda.launches", *options]
    run = subprocess.run(command, capture_output=True, text=True, env=real, cwd=ROOT)
    if run.returncode and re.search("NotFoundError|NvvmSupportError|No module named 'nvidia'", run.stderr):
        pytest.skip("NVIDIA's compiler libraries are not installed (pip install 'numba-cuda[cu13]')")
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def compiled(cc: int) -> list[dict[str, Any]]:
    """Every kernel that `launches.cases` starts, for one kind of card."""
    kernels: list[dict[str, Any]] = recorded("--cc", str(cc))
    return kernels


def shown(kernel: dict[str, Any]) -> str:
    return f"{kernel['label']}: {kernel['name']}"


@pytest.mark.parametrize("cc", CARDS)
def test_every_kernel_compiles_without_doubles_and_spills(cc: int) -> None:
    kernels = compiled(cc)
    assert len(kernels) > 100
    assert {shown(k): k["error"] for k in kernels if k["error"]} == {}
    # sin and cos of the device's library have a path for angles above 105615 that multiplies once in double.
    assert [shown(k) for k in kernels if k["doubles"] and k["name"] != "elementwise.rope"] == []
    assert {shown(k): k["spills"] for k in kernels if k["spills"]} == {}


@pytest.mark.parametrize("cc", CARDS)
def test_every_launch_is_within_the_limits_of_all_cards(cc: int) -> None:
    for kernel in compiled(cc):
        threads, grid = 1, [*kernel["grid"], 1, 1]
        for n in kernel["block"]:
            threads *= n
        assert threads <= 1024 and threads * kernel["registers"] <= 65536, shown(kernel)
        assert kernel["shared"] <= 48 << 10, shown(kernel)
        assert grid[0] < 1 << 31 and grid[1] < 1 << 16 and grid[2] < 1 << 16, shown(kernel)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_products_load_16_bytes_and_use_dp4a(name: str) -> None:
    kernels = {k["label"]: k for k in compiled(80) if k["name"] == "matmul.matvec"}
    for rows in (1, 2, 4, 8):
        kernel = kernels[f"{name} x{rows}"]
        # Two halves of 16 weights: a wide load of activations and one of their scales each per row, a dp4a per word.
        assert kernel["wide_loads"] >= 4 * rows + 2 * (name in ("Q4_K", "Q5_K"))
        assert kernel["dp4a"] >= 8 * rows


@pytest.mark.parametrize("name", ["F16", "BF16", "F32"])
def test_float_products_load_16_bytes(name: str) -> None:
    kernels = {k["label"]: k for k in compiled(80) if k["name"] == "dense.matvec"}
    for rows in (1, 2, 4, 8):
        assert kernels[f"{name} x{rows}"]["wide_loads"] >= 2 * rows + 1


def test_the_table_on_paper_is_what_the_compiler_made() -> None:
    """Bytes and instructions per weight in the head of matmul.py."""
    text = (ROOT / "backends" / "cuda" / "matmul.py").read_text(encoding="utf-8")
    table = {name: (float(b), float(n)) for name, b, n in re.findall(r"^    (\w+) +(\d\.\d+) +(\d\.\d)\b", text, re.M)}
    kernels = {k["label"]: k for k in compiled(80) if k["name"] == "matmul.matvec"}
    assert sorted(table) == sorted(BLOCK_TYPES)
    for name, (bytes_read, instructions) in table.items():
        info = QUANT_TABLE[GGMLType[name]]
        assert bytes_read == pytest.approx(info.type_size / info.block_size, abs=0.005)
        kernel = kernels[f"{name} x1"]
        assert instructions == pytest.approx(kernel["loop"] / (4 * kernel["loop_dp4a"]), rel=0.15), name


def test_a_step_crosses_once_each_way() -> None:
    step = recorded("--step")
    assert step["copies"] == {"up": 1, "down": 1}  # the batch's integers; the logits
    assert step["layer"].count("attention.partial") == 1
    assert len(step["layer"]) <= 20, step["layer"]
