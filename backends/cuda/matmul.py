"""Products with quantised weights: activations become int8 once, weights are read as the file's own bytes.

    y[m, n] = sum over halves of 16 weights:  xd * s * (q . xq) - mn * xs
where xq = round(x / xd) per 32 activations and xs = xd * sum(xq) per 16. Unpacking per type: unpack.py. `xm` holds
four float32 per 32 activations: xd, xs of the first half, xs of the second, and a gap, so that one load brings all.

matvec   1..8 rows of x: a warp per weight row, lanes take parts of 32 weights in turn; each weight is read and unpacked
         once for all rows. A part and one row of x: two 16-byte loads of xq, one or two of xm, 8 dp4a.
tiled    more rows: 64 weight rows x 64 tokens per block of 256 threads; a part of each row is unpacked into shared
         memory once and used for 64 tokens. Shared memory: 2 x 64 x 9 words + scales, 6.5 KB.
expert   matvec for (token, chosen expert) pairs: only chosen experts' rows are read.
Twin of all three: dequantise and multiply (`edgellm.backends.reference`).

On paper, one row of x: bytes and PTX instructions (sm_80) per weight; each further row adds 1.4 instructions.
    Q4_0    0.562  1.9
    Q4_1    0.625  1.7
    Q5_0    0.688  5.0
    Q5_1    0.750  4.7
    Q8_0    1.062  1.9
    Q4_K    0.562  3.9
    Q5_K    0.688  5.4
    Q6_K    0.820  5.4
    IQ4_NL  0.562  7.6
    IQ4_XS  0.531  8.2
    MXFP4   0.531  9.0
The bus is the limit where a card's instructions per second over its bytes per second exceed the quotient: Q4_K has 7,
Q6_K 6.6; an RTX 4090 has 41, an A100 9.6, an H200 6: there about 85% of the bandwidth is the most to hope for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, types

from edgellm.backends.cuda.device import as_float, dp4a, half_warp_sum, load16, warp_max, warp_sum
from edgellm.backends.cuda.unpack import Unpack

__all__ = ["TILE", "WARPS", "make_expert_matvec", "make_matvec", "make_tiled", "quantize_rows"]

f32, i32 = types.float32, types.int32
WARPS = 4
"""Warps, and so weight rows, per block of a matvec."""
TILE = 64
"""Weight rows and tokens per block of the tiled kernel."""
Kernel = Callable[..., Any]


@cuda.jit
def quantize_rows(x, xq, xm, total):
    """x float32 -> xq int8 and xm. One thread per value, a warp per 32; 32 divides `total`."""
    i = cuda.grid(1)
    value = x[i] if i < total else f32(0.0)
    top = warp_max(abs(value))
    d = top / f32(127.0)
    scaled = value * (f32(127.0) / top) if top > f32(0.0) else f32(0.0)
    # Round half away from zero: the same on the device and in the simulator.
    q = i32(scaled + f32(0.5)) if scaled >= f32(0.0) else i32(scaled - f32(0.5))
    half_sum = half_warp_sum(f32(q))
    if i < total:
        xq[i] = q
        group, lane = i >> 5, i & 31
        if lane == 0:
            xm[4 * group], xm[4 * group + 1] = d, d * half_sum
        elif lane == 16:
            xm[4 * group + 2] = d * half_sum


@cuda.jit(device=True)
def _half(q0, q1, q2, q3, s, m, xq, xm, at):
    """Product of 16 weights s * q - m with the 16 activations from `at` on, a multiple of 16."""
    a, b, c, e = load16(xq, at)
    d, low, high, _ = load16(xm, (at >> 5) << 4)
    total = as_float(high if at & 16 else low)
    return as_float(d) * s * f32(dp4a(q0, a, dp4a(q1, b, dp4a(q2, c, dp4a(q3, e, 0))))) - m * total


def make_matvec(kind: Unpack, block: int, size: int, rows: int) -> Kernel:
    """y (rows, n) for w of n * k / block * size bytes; `rows` is 1..8."""
    unpack, first, second = kind
    shift, mask = (block // 32).bit_length() - 1, block // 32 - 1

    @cuda.jit
    def matvec(w, xq, xm, y, n, k):
        lane = cuda.threadIdx.x & 31
        row = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        acc = cuda.local.array(rows, types.float32)
        for m in range(rows):
            acc[m] = f32(0.0)
        if row < n:
            base = row * (k // block) * size
            for p in range(lane, k >> 5, 32):
                b, part = p >> shift, p & mask
                q0, q1, q2, q3, q4, q5, q6, q7, s0, s1, m0, m1 = unpack(w, base + b * size, part)
                h0, h1 = b * block + first(part), b * block + second(part)
                for m in range(rows):
                    acc[m] += _half(q0, q1, q2, q3, s0, m0, xq, xm, m * k + h0)
                    acc[m] += _half(q4, q5, q6, q7, s1, m1, xq, xm, m * k + h1)
        for m in range(rows):
            total = warp_sum(acc[m])
            if lane == 0 and row < n:
                y[m * n + row] = total

    return matvec


def make_expert_matvec(kind: Unpack, block: int, size: int) -> Kernel:
    """y (pairs, n): pair p multiplies row p // share of x with expert ids[p]; w holds the experts one after another.
    Grid: ceil(n / 4) blocks for each pair in turn (a second dimension would end at 65535)."""
    unpack, first, second = kind
    shift, mask = (block // 32).bit_length() - 1, block // 32 - 1

    @cuda.jit
    def expert_matvec(w, ids, share, xq, xm, y, n, k):
        lane = cuda.threadIdx.x & 31
        blocks = (n + WARPS - 1) // WARPS
        pair = cuda.blockIdx.x // blocks
        row = cuda.blockIdx.x % blocks * WARPS + (cuda.threadIdx.x >> 5)
        x0 = pair // share * k
        acc = f32(0.0)
        if row < n:
            base = (ids[pair] * n + row) * (k // block) * size
            for p in range(lane, k >> 5, 32):
                b, part = p >> shift, p & mask
                q0, q1, q2, q3, q4, q5, q6, q7, s0, s1, m0, m1 = unpack(w, base + b * size, part)
                acc += _half(q0, q1, q2, q3, s0, m0, xq, xm, x0 + b * block + first(part))
                acc += _half(q4, q5, q6, q7, s1, m1, xq, xm, x0 + b * block + second(part))
        total = warp_sum(acc)
        if lane == 0 and row < n:
            y[pair * n + row] = total

    return expert_matvec


def make_tiled(kind: Unpack, block: int, size: int) -> Kernel:
    """y (m, n) for any m: threads (16, 16), grid (ceil(n / 64), ceil(m / 64)); each thread has 4 x 4 outputs."""
    unpack, first, second = kind
    shift, mask = (block // 32).bit_length() - 1, block // 32 - 1

    @cuda.jit
    def tiled(w, xq, xm, y, m, n, k):
        wq = cuda.shared.array((TILE, 9), types.int32)  # 9: neighbouring rows start in different banks
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
        for p in range(k >> 5):
            b, part = p >> shift, p & mask
            h0, h1 = b * block + first(part), b * block + second(part)
            if t < TILE:
                at = (min(n0 + t, n - 1) * (k // block) + b) * size
                q0, q1, q2, q3, q4, q5, q6, q7, s0, s1, low0, low1 = unpack(w, at, part)
                wq[t, 0], wq[t, 1], wq[t, 2], wq[t, 3] = q0, q1, q2, q3
                wq[t, 4], wq[t, 5], wq[t, 6], wq[t, 7] = q4, q5, q6, q7
                ws[t, 0], ws[t, 1], ws[t, 2], ws[t, 3] = s0, s1, low0, low1
            elif t < 2 * TILE:
                r = t - TILE
                at = min(m0 + r, m - 1) * k
                tq[r, 0], tq[r, 1], tq[r, 2], tq[r, 3] = load16(xq, at + h0)
                tq[r, 4], tq[r, 5], tq[r, 6], tq[r, 7] = load16(xq, at + h1)
                d, low, high, _ = load16(xm, ((at + h0) >> 5) << 4)
                ts[r, 0], ts[r, 2] = as_float(d), as_float(high if h0 & 16 else low)
                d, low, high, _ = load16(xm, ((at + h1) >> 5) << 4)
                ts[r, 1], ts[r, 3] = as_float(d), as_float(high if h1 & 16 else low)
            cuda.syncthreads()
            for i in range(4):
                a = tx + 16 * i
                for j in range(4):
                    c = ty + 16 * j
                    i0, i1 = i32(0), i32(0)
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
