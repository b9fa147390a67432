"""Time of the attention kernel alone: decode at a depth, and the last chunk of a prompt.

Usage: kernels_attention.py [--threads N] [--kv-type f16]. SmolLM2-135M's shape (30 layers, 9 / 3 heads of 64) and
Llama-1B's (16 layers, 32 / 8 heads of 64).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edgellm.backends.base import AttentionSpec, Batch, KVSpec
from edgellm.backends.cpu.backend import CPUBackend, CPUWeight
from edgellm.quants import GGMLType, QTensor

SHAPES = {"smollm2-135m": (30, 9, 3, 64), "llama-1b": (16, 32, 8, 64), "qwen3-8b": (4, 32, 8, 128)}


def batch_of(rows: int, depth: int) -> Batch:
    """The last `rows` rows of one sequence of `depth` positions, blocks in random order."""
    blocks = -(-depth // 32)
    table = (1 + np.random.default_rng(0).permutation(blocks)).astype(np.int32)[None]
    return Batch(
        ids=np.zeros(rows, np.int32),
        positions=np.arange(depth - rows, depth, dtype=np.int32),
        seq_starts=np.array([0, rows], np.int32),
        context_lens=np.array([depth], np.int32),
        block_tables=(table,),
        output_rows=np.array([rows - 1], np.int32),
        rope_variants=np.zeros(rows, np.int32),
    )


clock = time.perf_counter


def seconds(run: Callable[[], object], budget: float = 2.0) -> float:
    """Median of runs that fill about `budget` seconds."""
    run()
    times: list[float] = []
    while sum(times) < budget and len(times) < 50:
        start = clock()
        run()
        times.append(clock() - start)
    return float(np.median(times))


def measure(backend: CPUBackend, shape: str, kv_type: str, rows: int, depth: int) -> str:
    """One line: milliseconds for all layers, GB/s of cache read or GFLOP/s."""
    layers, heads, kv_heads, dim = SHAPES[shape]
    spec = AttentionSpec(scale=dim**-0.5)
    pages = [backend.new_kv(KVSpec(kv_heads, dim, dim, kv_type, 32, 0), depth // 32 + 2) for _ in range(layers)]
    rng = np.random.default_rng(0)
    fill = rng.standard_normal(pages[0].blocks.size // 2).astype(np.float16).view(np.uint8)
    for page in pages:
        page.blocks[1:] = fill.reshape(page.blocks.shape)[1:]
    q = rng.standard_normal((1, heads * dim)).astype(np.float32)
    table = CPUWeight(QTensor("q", GGMLType.F32, q.shape, q.view(np.uint8)))

    def forward(b: Batch) -> object:
        x = backend.embed(table, b.ids).reshape(-1, heads, dim)
        for page in pages:
            x = backend.attention(x, page, b, spec)
        return backend.take(x.reshape(-1, heads * dim), b.output_rows)

    batch = replace(batch_of(rows, depth))
    t = seconds(lambda: backend.execute(forward, batch))
    read = layers * depth * kv_heads * pages[0].layout.head / 32
    flops = 4 * layers * heads * dim * rows * (depth - rows / 2)
    speed = f"{read / t / 1e9:.1f} GB/s, {flops / t / 1e9:.0f} GFLOP/s"
    return f"{shape} {kv_type} rows {rows} depth {depth}: {t * 1e3:.2f} ms, {speed}"


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--shape", default="smollm2-135m", choices=sorted(SHAPES))
    args = parser.parse_args()
    backend = CPUBackend(threads=args.threads)
    for rows, depth in (
        (1, 128),
        (1, 2048),
        (1, 8192),
        *((n, 4096) for n in (2, 3, 4, 8, 12, 16, 32, 512)),
        (512, 512),
    ):
        print(measure(backend, args.shape, args.kv_type, rows, depth), flush=True)
    backend.close()


if __name__ == "__main__":
    main()
