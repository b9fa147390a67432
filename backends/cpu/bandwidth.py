"""Memory read bandwidth as kernels can see it: all threads read one large array in 32-byte loads, the best time counts.

Unit of work: 4096 bytes. Eight accumulators keep eight loads in flight; their xor is stored so that none is left out.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgellm.backends.cpu.jit import Library, kernel
from edgellm.backends.cpu.simd import bit_xor, load_i32x8, load_i64, registers, splat_i32x8, store, unroll

__all__ = ["PAGE", "measure_bandwidth", "read_memory"]

PAGE = 4096


@kernel
def read_memory(args: int, begin: int, end: int, scratch: int) -> None:
    """args: [address]. Reads pages begin..end and stores the xor of all 32-byte vectors at `scratch`."""
    source = load_i64(args)
    acc = registers(8)
    for i in unroll(8):
        acc[i] = splat_i32x8(0)
    for page in range(begin, end):
        base = source + page * 4096
        for step in range(16):
            for i in unroll(8):
                acc[i] = bit_xor(acc[i], load_i32x8(base + step * 256 + i * 32))
    for i in unroll(4):
        acc[i] = bit_xor(acc[i], acc[i + 4])
    store(scratch, bit_xor(bit_xor(acc[0], acc[1]), bit_xor(acc[2], acc[3])))


def measure_bandwidth(threads: int, n_bytes: int = 1 << 30, reads: int = 10) -> float:
    """Bytes per second: the best of `reads` reads of `n_bytes` by `threads` threads. Takes `n_bytes` of memory."""
    n_pages = n_bytes // PAGE
    data = np.ones(n_pages * PAGE, dtype=np.uint8)
    args = np.array([data.ctypes.data], dtype=np.int64)
    scratch = np.zeros((threads, 64), dtype=np.uint8)
    function = Library().function(read_memory)
    edges = [n_pages * t // threads for t in range(threads + 1)]

    def part(t: int) -> None:
        function(args.ctypes.data, edges[t], edges[t + 1], scratch[t].ctypes.data)

    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(reads):
            started = time.perf_counter()
            list(pool.map(part, range(threads)))
            best = min(best, time.perf_counter() - started)
    return n_pages * PAGE / best
