"""Activations to int8 blocks, once per input; every product with that input shares them.

Per token and block of B weights (256 for the K types, 32 for the others): d = max |x| / 127, q = round(x / d).
Layout, for panels of P tokens (PANELS) so that a tile kernel finds a block of its tokens side by side:

    q     int8     [block][token][B]
    sums  B = 256: [block][token][8] pairs of int16, the sums of q over 16 weights
          B = 32:  [block][token] int32, the sum of the block's q
    d     float32  [block][token]

Panels of one token (P = 1) come row after row instead, blocks in order: [token][block]. Tokens that fill up the last
panel hold anything: nobody reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from edgellm.backends.cpu.jit import Inline, Kernel, inline, kernel
from edgellm.backends.cpu.rows import pieces
from edgellm.backends.cpu.simd import (
    Vector,
    absolute,
    add,
    dot_u7,
    load_f32x8,
    load_i32,
    max_f32x8,
    maximum,
    mul,
    narrow_i32x8,
    permute,
    round_i32x8,
    splat_f32x8,
    splat_i8x32,
    splat_i32x8,
    store,
    store_f32,
    store_i32,
    sum_i32x8,
    unroll,
)
from edgellm.backends.cpu.simd_amx import HAS_TILES
from edgellm.backends.cpu.simd_pack import lane_i32x8
from edgellm.backends.cpu.vecmath import arg

PANELS = {32: (1, 16), 256: (1, 2, 4, 8, 16)} if HAS_TILES else {32: (1, 8), 256: (1, 2, 4, 8)}
"""Panel widths by block size."""
SMALLEST = np.float32(1e-30)
"""Blocks with no value above this become zeros (127 / max would overflow)."""


@dataclass(frozen=True)
class Layout:
    """Where the three parts of a quantised (n_tokens, k) input lie in one buffer."""

    block: int
    panel: int
    n_tokens: int
    k: int

    @property
    def n_blocks(self) -> int:
        """Blocks in a row."""
        return self.k // self.block

    @cached_property
    def n_panels(self) -> int:
        """Groups of `panel` tokens, the last one filled up."""
        return pieces(self.n_tokens, self.panel)

    @cached_property
    def sums_offset(self) -> int:
        """Bytes from the start to the sums."""
        return _aligned(int(self.n_panels) * self.panel * self.k)

    @cached_property
    def d_offset(self) -> int:
        """Bytes from the start to the scales."""
        per_block = 32 if self.block == 256 else 4
        return self.sums_offset + _aligned(int(self.n_panels) * self.panel * self.n_blocks * per_block)

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self.d_offset + _aligned(int(self.n_panels) * self.panel * self.n_blocks * 4)

    def addresses(self, base: int) -> tuple[int, int, int]:
        """Addresses of q, sums and d in a buffer."""
        return base, base + self.sums_offset, base + self.d_offset


def _aligned(n: int) -> int:
    return -(-n // 64) * 64


def panel_of(n_tokens: int, block: int) -> int:
    """Panel width for a number of tokens: the smallest that holds them, at most the widest. For blocks of 32 it is 1 up
    to eight tokens (one kernel serves them all, and one after the other their bytes are close enough together)."""
    if block == 32:
        return PANELS[block][0 if n_tokens <= 8 else 1]
    return next((p for p in PANELS[block] if n_tokens <= p), PANELS[block][-1])


_swap1 = permute("i32x8", [1, 0, 3, 2, 5, 4, 7, 6])
_swap2 = permute("i32x8", [2, 3, 0, 1, 6, 7, 4, 5])


@inline
def largest(x: int, n: int) -> np.float32:
    """max |x| of n floats, n a multiple of 8."""
    top = absolute(load_f32x8(x))
    for i in range(1, n // 8):
        top = maximum(absolute(load_f32x8(x + 32 * i)), top)
    return max_f32x8(top)


@inline
def round_32(x: int, inverse: np.float32) -> Vector:
    """32 floats times `inverse`, rounded to the nearest integers: int8."""
    scale = splat_f32x8(inverse)
    a = round_i32x8(mul(load_f32x8(x), scale))
    b = round_i32x8(mul(load_f32x8(x + 32), scale))
    c = round_i32x8(mul(load_f32x8(x + 64), scale))
    d = round_i32x8(mul(load_f32x8(x + 96), scale))
    return narrow_i32x8(a, b, c, d)


@inline
def sums_of_16(q: Vector) -> int:
    """Sums of the lower and the upper 16 of 32 int8, as a pair of int16 in one int32."""
    fours = dot_u7(splat_i32x8(0), splat_i8x32(1), q)
    twos = add(fours, _swap1(fours))
    all16 = add(twos, _swap2(twos))
    return (lane_i32x8(all16, 0) & 0xFFFF) | (lane_i32x8(all16, 4) << 16)


def _block_quantiser(block: int) -> Inline:
    def quantise_block(source: int, q: int, sums: int, d: int, place: int) -> None:
        """One token's block of floats -> the block at `place`, counted from the start."""
        top = largest(source, block)
        inverse = np.float32(0.0)
        if top > SMALLEST:
            inverse = np.float32(127.0) / top
        store_f32(d + 4 * place, top / np.float32(127.0))
        for g in unroll(block // 32):
            values = round_32(source + 128 * g, inverse)
            store(q + block * place + 32 * g, values)
            if block == 256:
                store_i32(sums + 4 * (8 * place + g), sums_of_16(values))
            else:
                ones = dot_u7(splat_i32x8(0), splat_i8x32(1), values)
                store_i32(sums + 4 * place, sum_i32x8(ones))

    return inline(quantise_block)


@cache
def quantise_kernel(block: int, panel: int) -> Kernel:
    """Kernel that quantises units of one (token, block) each, counted token by token.

    args: x, bytes between rows of x, blocks a row, q, sums, d, number of panels."""
    quantise_block = _block_quantiser(block)

    def quantise(args: int, begin: int, end: int, scratch: int) -> None:
        n_blocks, n_panels = arg(args, 2), arg(args, 6)
        for unit in range(begin, end):
            token, b = unit // n_blocks, unit % n_blocks
            source = arg(args, 0) + token * arg(args, 1) + b * (4 * block)
            place = b * n_panels * panel + token if panel > 1 else unit
            quantise_block(source, arg(args, 3), arg(args, 4), arg(args, 5), place)

    return kernel(quantise, f"quantise_{block}_{panel}")


@cache
def quantise_ordered_kernel(block: int, panel: int) -> Kernel:
    """As `quantise_kernel`, but unit p is one place in the panels: it takes row order[p] // share of x (none if < 0).

    args: as `quantise_kernel`, then order (int32) and share."""
    quantise_block = _block_quantiser(block)

    def quantise(args: int, begin: int, end: int, scratch: int) -> None:
        n_blocks, n_panels = arg(args, 2), arg(args, 6)
        for unit in range(begin, end):
            row = load_i32(arg(args, 7) + 4 * unit)
            if row >= 0:
                source = arg(args, 0) + row // arg(args, 8) * arg(args, 1)
                for b in range(n_blocks):
                    place = b * n_panels * panel + unit
                    quantise_block(source + b * (4 * block), arg(args, 3), arg(args, 4), arg(args, 5), place)

    return kernel(quantise, f"quantise_ordered_{block}_{panel}")
