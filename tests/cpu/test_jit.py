"""Kernels compile, are cached, load without Numba, and agree with their plain Python form."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from edgellm.backends.cpu import attention, team
from edgellm.backends.cpu.jit import Kernel, Library, inline, jit_disabled, kernel
from edgellm.backends.cpu.simd import (
    add,
    fma,
    load_f32x8,
    load_i64,
    registers,
    splat_f32x8,
    store_f32,
    sum_f32x8,
    unroll,
)


@inline
def dot(a: int, b: int, n: int) -> np.float32:
    acc = splat_f32x8(0.0)
    for i in range(n):
        acc = fma(load_f32x8(a + 32 * i), load_f32x8(b + 32 * i), acc)
    return sum_f32x8(acc)


def row_dot(copies: int) -> Kernel:
    def rows(args: int, begin: int, end: int, scratch: int) -> None:
        weights, x, out = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        for r in range(begin, end):
            store_f32(out + 4 * r, dot(weights + 256 * r, x, 8))
        acc = registers(copies)
        for i in unroll(copies):
            acc[i] = load_f32x8(x + 32 * i)
        for i in unroll(copies - 1):
            acc[0] = add(acc[0], acc[i + 1])
        if copies > 2:
            store_f32(out + 4 * end, sum_f32x8(acc[0]))

    return kernel(rows, f"test_row_dot_{copies}")


def run(function, w, x):
    out = np.zeros(len(w) + 1, np.float32)
    args = np.array([w.ctypes.data, x.ctypes.data, out.ctypes.data], np.int64)
    function(args.ctypes.data, 0, len(w), 0)
    return out


@pytest.mark.kernel
@pytest.mark.parametrize("copies", [2, 3])
def test_compiled_equals_plain(tmp_path, monkeypatch, copies):
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    rng = np.random.default_rng(7)
    w, x = rng.standard_normal((5, 64), np.float32), rng.standard_normal(64, np.float32)
    item = row_dot(copies)
    plain, compiled = run(item, w, x), run(Library().function(item), w, x)
    np.testing.assert_allclose(plain[:5], w @ x, rtol=1e-5)
    np.testing.assert_allclose(compiled, plain, rtol=1e-5, atol=1e-5)
    expected = sum(x[8 * i : 8 * i + 8] for i in range(3)).sum()
    assert compiled[5] == (pytest.approx(expected, rel=1e-5) if copies > 2 else 0)
    if not jit_disabled():
        assert [p.name for p in tmp_path.rglob("*.o")] == [f"{item.key}.o"]
        assert Library().missing([item]) == []


@pytest.mark.skipif(jit_disabled(), reason="nothing is compiled")
def test_a_cache_that_cannot_be_written_is_said_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "kernels").write_bytes(b"a file where the folder should be")
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    library = Library()
    library.load([row_dot(2), row_dot(3)])
    assert library.address(row_dot(2)) and library.address(row_dot(3))
    (said,) = caplog.messages
    assert "compiled anew at every start" in said and str(tmp_path / "kernels") in said


@pytest.mark.skipif(jit_disabled(), reason="nothing is compiled")
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    monkeypatch.setattr(os, "replace", full)
    Library().load([row_dot(2)])
    assert "No space left" in caplog.text
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_cached_kernel_loads_without_numba(tmp_path, monkeypatch):
    """b: the second start must not pay for importing the compiler."""
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    Library().load([row_dot(2)])
    code = (
        "import sys; from tests.cpu.test_jit import row_dot; from edgellm.backends.cpu.jit import Library\n"
        "assert Library().address(row_dot(2)); assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_constants_of_other_files_are_part_of_the_key(monkeypatch):
    """An object compiled for another layout of the data would write where it must not."""
    keys = {team.team_work.key, attention.attention_combine.key}
    monkeypatch.setattr(team, "DONE", team.DONE + 1)
    monkeypatch.setattr(attention, "UNIT_FIELDS", attention.UNIT_FIELDS + 1)
    assert keys.isdisjoint({team.team_work.key, attention.attention_combine.key})
