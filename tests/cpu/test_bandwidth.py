"""The bandwidth kernel reads every byte once: its xor equals numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.backends.cpu.bandwidth import PAGE, measure_bandwidth, read_memory
from edgellm.backends.cpu.jit import Library


@pytest.mark.kernel
@pytest.mark.parametrize("compiled", [False, True])
def test_reads_every_byte_of_its_pages_and_no_other(compiled: bool) -> None:
    rng = np.random.default_rng(7)
    data = rng.integers(0, 256, 5 * PAGE, dtype=np.uint8)
    args, scratch = np.array([data.ctypes.data], dtype=np.int64), np.zeros(32, dtype=np.uint8)
    function = Library().function(read_memory) if compiled else read_memory
    function(args.ctypes.data, 1, 4, scratch.ctypes.data)
    expected = np.bitwise_xor.reduce(data[PAGE : 4 * PAGE].reshape(-1, 32), axis=0)
    assert scratch.tolist() == expected.tolist()


def test_measures_a_finite_number() -> None:
    assert 0 < measure_bandwidth(2, n_bytes=1 << 16, reads=2) < float("inf")
