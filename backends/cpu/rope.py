"""Rotary embedding: (a, b) -> (a cos - b sin, a sin + b cos) over the pairs of each head.

cos and sin come from a table made per step in numpy (positions are few, and its sine is exact to the last bit or two).
For a few rows, of answers that grow, they are made for a run of positions at once: numpy's sine, which nothing else in
a step needs, takes 0.25 ms where weights have just driven it out of the caches.
A unit is one head of one token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import Batch, RopeSpec
from edgellm.backends.cpu.arena import Buf
from edgellm.backends.cpu.jit import Kernel, kernel
from edgellm.backends.cpu.simd import (
    fma,
    load_f32,
    load_f32x8,
    mul,
    permute2,
    splat_f32x8,
    store,
    store_f32,
    sub,
)
from edgellm.backends.cpu.tape import Tape
from edgellm.backends.cpu.vecmath import ZERO, arg

__all__ = ["record_rope"]

_evens = permute2("f32x8", [0, 2, 4, 6, 8, 10, 12, 14])
_odds = permute2("f32x8", [1, 3, 5, 7, 9, 11, 13, 15])
_zip_low = permute2("f32x8", [0, 8, 1, 9, 2, 10, 3, 11])
_zip_high = permute2("f32x8", [4, 12, 5, 13, 6, 14, 7, 15])


def _rotation(adjacent: bool) -> Kernel:
    """args: x, out, heads, head_dim, n_dims, cos, sin (float32 (n_tokens, n_dims / 2))."""

    def rotate(args: int, begin: int, end: int, scratch: int) -> None:
        heads, dim, half = arg(args, 2), arg(args, 3), arg(args, 4) // 2
        whole = half // 8 * 8
        stride = 1 if not adjacent else 2
        second = half if not adjacent else 1
        for unit in range(begin, end):
            x, out = arg(args, 0) + 4 * dim * unit, arg(args, 1) + 4 * dim * unit
            row = 4 * half * (unit // heads)
            cos, sin = arg(args, 5) + row, arg(args, 6) + row
            for i in range(0, whole, 8):
                c, s = load_f32x8(cos + 4 * i), load_f32x8(sin + 4 * i)
                if adjacent:
                    low, high = load_f32x8(x + 8 * i), load_f32x8(x + 8 * i + 32)
                    a, b = _evens(low, high), _odds(low, high)
                else:
                    a, b = load_f32x8(x + 4 * i), load_f32x8(x + 4 * (half + i))
                u = fma(a, c, mul(sub(splat_f32x8(ZERO), b), s))
                v = fma(a, s, mul(b, c))
                if adjacent:
                    store(out + 8 * i, _zip_low(u, v))
                    store(out + 8 * i + 32, _zip_high(u, v))
                else:
                    store(out + 4 * i, u)
                    store(out + 4 * (half + i), v)
            for i in range(whole, half):
                c1, s1 = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
                a1, b1 = load_f32(x + 4 * stride * i), load_f32(x + 4 * (stride * i + second))
                store_f32(out + 4 * stride * i, a1 * c1 - b1 * s1)
                store_f32(out + 4 * (stride * i + second), a1 * s1 + b1 * c1)
            for i in range(2 * half, dim):
                store_f32(out + 4 * i, load_f32(x + 4 * i))

    return kernel(rotate, f"rope_{'adjacent' if adjacent else 'halves'}")


ROTATIONS = {adjacent: _rotation(adjacent) for adjacent in (False, True)}
Tables = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
FEW_ROWS = 16
RUN = 64
"""Positions that are made at once for steps of up to FEW_ROWS rows."""
RUNS_KEPT = 2 * FEW_ROWS


def angles(spec: RopeSpec, positions: npt.NDArray[np.int32], variants: npt.NDArray[np.int32]) -> Tables:
    """cos and sin, float32 (len(positions), n_dims / 2)."""
    angle = positions[:, None].astype(np.float32) * spec.inv_freq[variants]
    magnitude = spec.magnitude[variants][:, None]
    return np.cos(angle) * magnitude, np.sin(angle) * magnitude


class RunsOfAngles:
    """`angles` for a few rows from runs of RUN positions, the same bits."""

    def __init__(self, spec: RopeSpec):
        self._spec = spec
        self._runs: dict[tuple[int, int], Tables] = {}

    def fill(self, batch: Batch, cos: npt.NDArray[np.float32], sin: npt.NDArray[np.float32]) -> None:
        """Write the rows of a batch."""
        rows = zip(batch.positions.tolist(), batch.rope_variants.tolist(), strict=True)
        for i, (position, variant) in enumerate(rows):
            run = self._runs.get((position // RUN, variant)) or self._make(position // RUN, variant)
            cos[i], sin[i] = run[0][position % RUN], run[1][position % RUN]

    def _make(self, number: int, variant: int) -> Tables:
        if len(self._runs) >= RUNS_KEPT:
            self._runs.clear()
        positions = np.arange(number * RUN, (number + 1) * RUN, dtype=np.int32)
        run = self._runs[number, variant] = angles(self._spec, positions, np.full(RUN, variant, np.int32))
        return run


def _tables(tape: Tape, spec: RopeSpec) -> Tables:
    """cos and sin of this step's rows, filled before every run; shared by all layers that use the same spec."""
    key = ("rope", id(spec))
    if key not in tape.shared:
        cos, sin = (np.zeros((tape.n_tokens, spec.n_dims // 2), np.float32) for _ in range(2))
        runs = RunsOfAngles(spec)

        def fill(batch: Batch) -> None:
            if batch.n_tokens <= FEW_ROWS:
                runs.fill(batch, cos, sin)
            else:
                cos[: batch.n_tokens], sin[: batch.n_tokens] = angles(spec, batch.positions, batch.rope_variants)

        tape.replay.append(fill)
        tape.shared[key] = (cos, sin)
    tables: Tables = tape.shared[key]
    return tables


def record_rope(tape: Tape, x: Buf, spec: RopeSpec) -> Buf:
    """Rotate x (n_tokens, heads, head_dim)."""
    cos, sin = _tables(tape, spec)
    n, heads, dim = x.shape
    out = tape.new(*x.shape)
    args = (x, out, heads, dim, spec.n_dims, cos, sin)
    tape.op(ROTATIONS[spec.adjacent], n * heads, args, reads=[x], writes=[out], step=0, grain=(x, dim))
    return out
