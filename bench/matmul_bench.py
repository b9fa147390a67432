"""Matrix kernels alone: GB/s of one token, cost of 2, 4 and 8 tokens, GOP/s of 512, for each quantised type.

    python bench/matmul_bench.py [--threads 2] [--mb 256] [--k 2048] [--gemm-rows 4096] [TYPE ...]

Weights are random bytes (speed does not depend on values). `cpu` columns divide by one thread's CPU time instead of
wall time, so they mean something on a busy machine too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import numpy as np

from edgellm.backends.cpu.jit import Library
from edgellm.backends.cpu.matmul import QUANTISED, linear_kernel, panel_width, scratch_bytes
from edgellm.backends.cpu.quantise import Layout, panel_of, quantise_kernel
from edgellm.backends.cpu.simd import ISA
from edgellm.backends.cpu.simd_wide import LANES
from edgellm.quants import QUANT_TABLE, GGMLType

LIBRARY = Library()


def aligned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory that begins with a cache line, as a team's scratch does."""
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


class Product:
    """One weight matrix times `n` tokens, ready to run."""

    def __init__(self, kind: str, data: np.ndarray[Any, np.dtype[np.uint8]], k: int, n: int, threads: int):
        info = QUANT_TABLE[GGMLType[kind]]
        self.m, self.threads = len(data), threads
        width = panel_of(n, info.block_size)
        single = n <= width
        self.layout = Layout(info.block_size, panel_width(kind, width, single), n, k)
        x = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
        self.form, self.out = aligned(self.layout.nbytes), np.zeros((n, self.m), np.float32)
        q, sums, d = self.layout.addresses(self.form.ctypes.data)
        given = (x.ctypes.data, 4 * k, self.layout.n_blocks, q, sums, d, self.layout.n_panels)
        quantise = np.array(given, np.int64)
        spare = np.zeros(64, np.uint8)
        LIBRARY.function(quantise_kernel(info.block_size, self.layout.panel))(
            quantise.ctypes.data, 0, n * self.layout.n_blocks, spare.ctypes.data
        )
        places = (data.ctypes.data, data.shape[1], self.m, self.layout.n_blocks, q, sums, d, n, self.layout.n_panels)
        self.args = np.array((*places, self.out.ctypes.data, 4 * self.m, 0, 0), np.int64)
        self.scratch = [aligned(scratch_bytes(kind, self.layout, width, single)) for _ in range(threads)]
        self.call = LIBRARY.function(linear_kernel(kind, width, single))
        self.keep = x, data

    def run(self, pool: ThreadPoolExecutor) -> None:
        """All rows, on all threads."""
        units, counter = -(-self.m // LANES), itertools.count()
        step = max(1, units // (8 * self.threads))  # claims are made in Python: few of them

        def work(thread: int) -> None:
            while (begin := next(counter) * step) < units:
                self.call(self.args.ctypes.data, begin, min(begin + step, units), self.scratch[thread].ctypes.data)

        if self.threads == 1:
            work(0)
        else:
            list(pool.map(work, range(self.threads)))


def best(run: Callable[[], None], clock: Callable[[], float], repeats: int) -> float:
    """Shortest of several runs, in seconds."""
    times = []
    for _ in range(repeats):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


@click.command()
@click.argument("kinds", nargs=-1)
@click.option("--threads", default=2)
@click.option("--mb", default=256, help="Size of the matrix for few tokens.")
@click.option("--k", default=2048)
@click.option("--gemm-rows", default=4096, help="Weight rows for 512 tokens.")
@click.option("--repeats", default=5)
def main(kinds: tuple[str, ...], threads: int, mb: int, k: int, gemm_rows: int, repeats: int) -> None:
    """Print one line a type."""
    pool = ThreadPoolExecutor(threads)
    click.echo(f"{ISA}, {threads} threads, k {k}")
    for kind in kinds or sorted(QUANTISED):
        info = QUANT_TABLE[GGMLType[kind]]
        row = k // info.block_size * info.type_size
        rows = mb * 1_000_000 // row // LANES * LANES
        data = np.random.default_rng(0).integers(0, 256, (rows, row), dtype=np.uint8)
        line, one = f"{kind:7}", [0.0, 0.0]
        for n in (1, 2, 4, 8):
            wall, single = Product(kind, data, k, n, threads), Product(kind, data, k, n, 1)
            seconds = best(lambda p=wall: p.run(pool), time.perf_counter, repeats)
            cpu = best(lambda p=single: p.run(pool), time.thread_time, repeats)
            if n == 1:
                one = [seconds, cpu]
                line += f" one token {data.nbytes / seconds / 1e9:5.1f} GB/s (cpu {data.nbytes / cpu / 1e9:5.1f});"
            else:
                line += f" {n}: {seconds / one[0]:.2f} (cpu {cpu / one[1]:.2f})"
        data, n = data[:gemm_rows], 512
        wall, single = Product(kind, data, k, n, threads), Product(kind, data, k, n, 1)
        operations = 2 * n * k * len(data) / 1e9
        seconds = best(lambda p=wall: p.run(pool), time.perf_counter, 3)
        cpu = best(lambda p=single: p.run(pool), time.thread_time, 3)
        click.echo(f"{line}; 512 tokens {operations / seconds:4.0f} GOP/s (cpu {operations / cpu:4.0f})")


if __name__ == "__main__":
    main()
