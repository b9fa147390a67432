"""Types with blocks of 32 weights times one token: a row's bytes are read in order, eight blocks at a time.

The values of a row's blocks (matmul_32.py) go to scratch; then eight rows together, one in each lane, take their blocks
in rising order, one FMA each. So no sum ever runs along a vector, and the order is that of the tile kernel.
"""

from __future__ import annotations

from functools import cache

from edgellm.backends.cpu import matmul_row
from edgellm.backends.cpu.jit import Kernel, inline
from edgellm.backends.cpu.matmul_32 import Format32, codes_of
from edgellm.backends.cpu.simd import (
    dot_u7,
    float_of_int,
    fma,
    fma_f32,
    load_f16,
    load_i8x32,
    load_i32,
    load_i32x8,
    mul,
    prefetch_far,
    registers,
    splat_i32x8,
    store,
    store_f32,
    sub,
    sum_i32x8,
    to_f32x8,
    unroll,
)
from edgellm.backends.cpu.simd_dot import dot_signed
from edgellm.backends.cpu.simd_pack import load_e8m0, load_e8m0x8_apart, load_f16x8_apart, sums_of_eight


@cache
def row_kernel(form: Format32) -> Kernel:
    """Kernel over units of LANES rows; args as in matmul_args.py, one token a panel."""
    codes, type_size, signed, offset, minimum = (
        codes_of(form),
        form.type_size,
        form.sums == 0,
        form.offset,
        form.minimum,
    )
    load_d, load_d8 = (load_e8m0, load_e8m0x8_apart) if form.exponent else (load_f16, load_f16x8_apart)
    lines, ahead = (8 * type_size + 63) // 64, matmul_row.AHEAD

    @inline
    def dot(p: int, x: int):  # type: ignore[no-untyped-def]
        if signed:
            return dot_signed(codes(p), load_i8x32(x))
        else:
            return dot_u7(splat_i32x8(0), codes(p), load_i8x32(x))

    @inline
    def values_of_row(p: int, x: int, sums: int, n_blocks: int, values: int) -> None:
        whole = n_blocks // 8 * 8
        for b in range(0, whole, 8):
            part = registers(8)
            for i in unroll(8):
                for line in unroll(lines * (i + 1) // 8 - lines * i // 8):
                    prefetch_far(p + ahead + 64 * (lines * i // 8 + line))
                part[i] = dot(p + i * type_size, x + 32 * i)
            isum = sums_of_eight(part[0], part[1], part[2], part[3], part[4], part[5], part[6], part[7])
            d8 = load_d8(p, type_size)
            if offset != 0:
                isum = sub(isum, mul(load_i32x8(sums), splat_i32x8(offset)))
            value = mul(to_f32x8(isum), d8)
            if minimum:
                value = fma(to_f32x8(load_i32x8(sums)), load_f16x8_apart(p + 2, type_size), value)
            store(values + 4 * b, value)
            p += 8 * type_size
            x += 256
            sums += 32
        for b in range(whole, n_blocks):
            single = sum_i32x8(dot(p, x)) - offset * load_i32(sums)
            scaled = float_of_int(single) * load_d(p)
            if minimum:
                scaled = fma_f32(float_of_int(load_i32(sums)), load_f16(p + 2), scaled)
            store_f32(values + 4 * b, scaled)
            p += type_size
            x += 32
            sums += 4

    return matmul_row.row_kernel(form.name, 32, values_of_row)
