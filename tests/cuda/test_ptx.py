"""What the compiler makes of the matvec kernels, without a GPU: wide loads and integer dot products."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install 'edgellm[cuda]')")

COMPILE = """
import types as python_types
import numba.cuda.dispatcher as dispatcher
from numba import cuda, types
dispatcher.get_current_device = lambda: python_types.SimpleNamespace(compute_capability=(8, 0))
from edgellm.backends.cuda.matmul import make_matvec
from edgellm.backends.cuda.unpack import UNPACK
from edgellm.quants import QUANT_TABLE, GGMLType
kind = GGMLType[{name!r}]
info = QUANT_TABLE[kind]
kernel = make_matvec(UNPACK[kind], info.block_size, info.type_size, 4).py_func
u8, f32, i64 = types.uint8[::1], types.float32[::1], types.int64
print(cuda.compile_ptx(kernel, (u8, u8, f32, f32, f32, i64, i64), cc=(8, 0))[0])
"""


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "IQ4_XS", "MXFP4"])
def test_matvec_ptx(name: str) -> None:
    real = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}  # the simulator has no compiler
    run = subprocess.run([sys.executable, "-c", COMPILE.format(name=name)], capture_output=True, text=True, env=real)
    if "NotFoundError" in run.stderr or "NvvmSupportError" in run.stderr:
        pytest.skip("NVIDIA's compiler libraries are not installed (pip install 'numba-cuda[cu13]')")
    assert run.returncode == 0, run.stderr[-2000:]
    # Four rows, two halves of 16 weights: at least one wide load of activations each, and dp4a for every word.
    assert run.stdout.count("ld.global.v4") >= 2
    assert run.stdout.count("dp4a.s32.s32") >= 8
    if name in ("Q4_K", "Q5_K"):
        assert run.stdout.count("ld.global.v4") >= 3, "weights are loaded 16 bytes at a time too"
    assert ".f64" not in run.stdout, "no double arithmetic"
