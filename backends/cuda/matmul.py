"""Products with quantised weights: activations become int8 once, weights are read as the file's own bytes.

    y[m, n] = sum over halves of 16 weights:  xd * s * (q . xq) - mn * xs
where xq = round(x / xd) per 32 activations and xs = xd * sum(xq) per 16. Unpacking per type: unpack.py.

matvec   1..8 rows of x: a warp per weight row, lanes take parts of 32 weights in turn; each weight is read and unpacked
         once for all rows. Registers: 8 words, 4 scales, one sum per row.
tiled    more rows: 64 weight rows x 64 tokens per block of 256 threads; a part of each row is unpacked into shared
         memory once and used for 64 tokens. Shared memory: 2 x 64 x 8 words + scales, about 6 KB.
expert   matvec for (token, chosen expert) pairs: only chosen experts' rows are read.
Twin of all three: dequantise and multiply (`edgellm.backends.reference`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, types

from edgellm.backends.cuda.device import dp4a, load16, warp_sum
from edgellm.backends.cuda.unpack import Unpack

__all__ = ["TILE", "WARPS", "make_expert_matvec", "make_matvec", "make_tiled", "quantize_rows"]

f32 = types.float32
WARPS = 4
"""Warps, and so weight rows, per block of a matvec."""
TILE = 64
"""Weight rows and tokens per block of the tiled kernel."""
Kernel = Callable[..., Any]


@cuda.jit
def quantize_rows(x, xq, xd, xs, n_groups):
    """x float32 -> xq int8, xd float32 per 32, xs = xd * sum per 16. One thread per group of 32."""
    g = cuda.grid(1)
    if g >= n_groups:
        return
    top = f32(0.0)
    for i in range(32):
        top = max(top, abs(x[32 * g + i]))
    d = top / f32(127.0)
    inverse = f32(127.0) / top if top > f32(0.0) else f32(0.0)
    for h in range(2):
        total = 0
        for i in range(16):
            at = 32 * g + 16 * h + i
            value = x[at] * inverse
            # Round half away from zero: the same on the device and in the simulator.
            q = int(value + f32(0.5)) if value >= f32(0.0) else -int(f32(0.5) - value)
            xq[at] = q
            total += q
        xs[2 * g + h] = d * f32(total)
    xd[g] = d


@cuda.jit(device=True)
def dot16(q0, q1, q2, q3, xq, at):
    """Integer product of 16 weights with 16 activations at byte `at` (a multiple of 16)."""
    a, b, c, d = load16(xq, at)
    return dp4a(q0, a, dp4a(q1, b, dp4a(q2, c, dp4a(q3, d, 0))))


def make_matvec(kind: Unpack, block: int, size: int, rows: int) -> Kernel:
    """y (rows, n) for w of n * k / block * size bytes; `rows` is 1..8."""
    unpack, first, second = kind
    parts = block // 32

    @cuda.jit
    def matvec(w, xq, xd, xs, y, n, k):
        lane = cuda.threadIdx.x % 32
        row = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        acc = cuda.local.array(rows, types.float32)
        for m in range(rows):
            acc[m] = f32(0.0)
        if row < n:
            for p in range(lane, k // 32, 32):
                b, part = p // parts, p % parts
                q0, q1, q2, q3, q4, q5, q6, q7, s0, s1, m0, m1 = unpack(w, (row * (k // block) + b) * size, part)
                h0, h1 = b * block + first(part), b * block + second(part)
                for m in range(rows):
                    i0 = dot16(q0, q1, q2, q3, xq, m * k + h0)
                    i1 = dot16(q4, q5, q6, q7, xq, m * k + h1)
                    acc[m] += xd[(m * k + h0) // 32] * s0 * f32(i0) - m0 * xs[(m * k + h0) // 16]
                    acc[m] += xd[(m * k + h1) // 32] * s1 * f32(i1) - m1 * xs[(m * k + h1) // 16]
        for m in range(rows):
            total = warp_sum(acc[m])
            if lane == 0 and row < n:
                y[m * n + row] = total

    return matvec


def make_expert_matvec(kind: Unpack, block: int, size: int) -> Kernel:
    """y (pairs, n): pair p multiplies row p // share of x with expert ids[p]; w holds the experts one after another."""
    unpack, first, second = kind
    parts = block // 32

    @cuda.jit
    def expert_matvec(w, ids, share, xq, xd, xs, y, n, k):
        lane = cuda.threadIdx.x % 32
        row = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        pair = cuda.blockIdx.y
        x0 = pair // share * k
        acc = f32(0.0)
        if row < n:
            base = (ids[pair] * n + row) * (k // block)
            for p in range(lane, k // 32, 32):
                b, part = p // parts, p % parts
                q0, q1, q2, q3, q4, q5, q6, q7, s0, s1, m0, m1 = unpack(w, (base + b) * size, part)
                h0, h1 = x0 + b * block + first(part), x0 + b * block + second(part)
                acc += xd[h0 // 32] * s0 * f32(dot16(q0, q1, q2, q3, xq, h0)) - m0 * xs[h0 // 16]
                acc += xd[h1 // 32] * s1 * f32(dot16(q4, q5, q6, q7, xq, h1)) - m1 * xs[h1 // 16]
        total = warp_sum(acc)
        if lane == 0 and row < n:
            y[pair * n + row] = total

    return expert_matvec


def make_tiled(kind: Unpack, block: int, size: int) -> Kernel:
    """y (m, n) for any m: threads (16, 16), grid (ceil(n / 64), ceil(m / 64)); each thread has 4 x 4 outputs."""
    unpack, first, second = kind
    parts = block // 32

    @cuda.jit
    def tiled(w, xq, xd, xs, y, m, n, k):
        wq = cuda.shared.array((TILE, 9), types.int32)
        ws = cuda.shared.array((TILE, 4), types.float32)
        tq = cuda.shared.array((TILE, 9), types.int32)
        ts = cuda.shared.array((TILE, 4), types.float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        t = ty * 16 + tx
        n0, m0 = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
        acc = cuda.local.array((4, 4), types.float32)
        for i in range(4):
            for j in range(4):
                acc[i, j] = f32(0.0)
        for p in range(k // 32):
            b, part = p // parts, p % parts
            h0, h1 = b * block + first(part), b * block + second(part)
            if t < TILE:
                row = min(n0 + t, n - 1)
                q = unpack(w, (row * (k // block) + b) * size, part)
                for i in range(8):
                    wq[t, i] = q[i]
                for i in range(4):
                    ws[t, i] = q[8 + i]
            elif t < 2 * TILE:
                r = t - TILE
                at = min(m0 + r, m - 1) * k
                tq[r, 0], tq[r, 1], tq[r, 2], tq[r, 3] = load16(xq, at + h0)
                tq[r, 4], tq[r, 5], tq[r, 6], tq[r, 7] = load16(xq, at + h1)
                ts[r, 0], ts[r, 1] = xd[(at + h0) // 32], xd[(at + h1) // 32]
                ts[r, 2], ts[r, 3] = xs[(at + h0) // 16], xs[(at + h1) // 16]
            cuda.syncthreads()
            for i in range(4):
                a = tx + 16 * i
                for j in range(4):
                    c = ty + 16 * j
                    i0, i1 = 0, 0
                    for u in range(4):
                        i0 = dp4a(wq[a, u], tq[c, u], i0)
                        i1 = dp4a(wq[a, u + 4], tq[c, u + 4], i1)
                    acc[i, j] += ts[c, 0] * ws[a, 0] * f32(i0) - ws[a, 2] * ts[c, 2]
                    acc[i, j] += ts[c, 1] * ws[a, 1] * f32(i1) - ws[a, 3] * ts[c, 3]
            cuda.syncthreads()
        for i in range(4):
            for j in range(4):
                row, token = n0 + tx + 16 * i, m0 + ty + 16 * j
                if row < n and token < m:
                    y[token * n + row] = acc[i, j]

    return tiled
