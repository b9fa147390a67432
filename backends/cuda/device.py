"""What the kernels need beyond plain Python, once for the GPU and once for numba-cuda's simulator.

The simulator runs kernels as Python threads over numpy arrays; it has no warp shuffles, no inline PTX and no wide
loads. Everything it lacks is here and nowhere else. `w` is always a 1-D uint8 device array, `at` a byte offset."""

from __future__ import annotations

import os
from operator import mul
from struct import pack, unpack

import numpy as np
from numba import config, cuda, types

__all__ = ["SIMULATED", "as_float", "bits", "dp4a", "f16", "half_warp_sum", "i8", "load4", "load16", "pair16", "u16"]
__all__ += ["warp_max", "warp_sum"]

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
WARP = 32
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # a norm of one row is a small grid, and that is right

if SIMULATED:
    from edgellm.backends.cuda import simulator

    simulator.install()

    def dp4a(a, b, c):
        """c + the four signed byte products of a and b."""
        return int(c) + sum(map(mul, unpack("4b", pack("i", a)), unpack("4b", pack("i", b))))

    def _bytes(w, at, n, dtype):
        return np.array([w[at + i] for i in range(n)], np.uint8).view(dtype)

    def u16(w, at):
        """Unsigned 16 bits at an even offset, as int32."""
        return int(_bytes(w, at, 2, np.uint16)[0])

    def i8(w, at):
        """Signed byte, as int32."""
        return int(_bytes(w, at, 1, np.int8)[0])

    def load4(w, at):
        """int32 at an offset that 4 divides."""
        return int(_bytes(w, at, 4, np.int32)[0])

    def load16(w, at):
        """Four int32 at an offset that 16 divides, in one load."""
        return tuple(int(x) for x in _bytes(w, at, 16, np.int32))

    def pair16(w, at):
        """int32 from two 16-bit loads, at an even offset."""
        return int(_bytes(w, at, 4, np.int32)[0])

    def bits(word, at, count):
        """Bits at .. at + count - 1 of a word, as int32."""
        return (int(word) & 0xFFFFFFFF) >> at & ((1 << count) - 1)

    def f16(word):
        """float32 of the float16 in a word's low half."""
        return np.float32(np.array([word & 0xFFFF], np.uint16).view(np.float16)[0])

    def as_float(word):
        """float32 of its bits."""
        return np.array([word & 0xFFFFFFFF], np.uint32).view(np.float32)[0]

    @cuda.jit(device=True)
    def _lanes(x):
        """The values of a warp's 32 lanes, in every lane. All threads of the block must call it."""
        parts = cuda.shared.array(1024, types.float32)
        me = cuda.threadIdx.x
        parts[me] = x
        cuda.syncthreads()
        values = parts[me - me % WARP : me - me % WARP + WARP].copy()
        cuda.syncthreads()
        return values, me % WARP

    def _exchange(x, first, combine):
        """What `combine` makes of lanes whose numbers differ in one bit, for first, first / 2 .. 1."""
        values, lane = _lanes(x)
        while first:
            values, first = combine(values, values[np.arange(WARP) ^ first]), first // 2
        return values[lane]

    def warp_sum(x):
        """Sum over the 32 lanes of a warp, in every lane. All threads of the block must call it."""
        return _exchange(x, 16, np.add)

    def warp_max(x):
        """Largest value of the 32 lanes of a warp, in every lane. All threads of the block must call it."""
        return _exchange(x, 16, np.maximum)

    def half_warp_sum(x):
        """Sum over lanes 0 .. 15, or 16 .. 31: each lane's own half. All threads of the block must call it."""
        return _exchange(x, 8, np.add)

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    I8, I16, I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)

    def _address(context, builder, array_type, array, at, element):
        pointer = context.make_array(array_type)(context, builder, array).data
        byte = builder.gep(builder.bitcast(pointer, I8.as_pointer()), [at])
        return builder.bitcast(byte, element.as_pointer())

    @intrinsic
    def dp4a(typingctx, a, b, c):
        """c + the four signed byte products of a and b (PTX dp4a.s32.s32)."""

        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(I32, [I32, I32, I32])
            return builder.asm(kind, "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", args, False)

        return types.int32(types.int32, types.int32, types.int32), codegen

    @intrinsic
    def u16(typingctx, w, at):
        """Unsigned 16 bits at an even offset, as int32."""

        def codegen(context, builder, signature, args):
            address = _address(context, builder, signature.args[0], args[0], args[1], I16)
            return builder.zext(builder.load(address, align=2), I32)

        return types.int32(w, types.int64), codegen

    @intrinsic
    def i8(typingctx, w, at):
        """Signed byte, as int32."""

        def codegen(context, builder, signature, args):
            address = _address(context, builder, signature.args[0], args[0], args[1], I8)
            return builder.sext(builder.load(address, align=1), I32)

        return types.int32(w, types.int64), codegen

    @intrinsic
    def load4(typingctx, w, at):
        """int32 at an offset that 4 divides."""

        def codegen(context, builder, signature, args):
            address = _address(context, builder, signature.args[0], args[0], args[1], I32)
            return builder.load(address, align=4)

        return types.int32(w, types.int64), codegen

    @intrinsic
    def load16(typingctx, w, at):
        """Four int32 at an offset that 16 divides, in one load."""

        def codegen(context, builder, signature, args):
            wide = ir.VectorType(I32, 4)
            address = _address(context, builder, signature.args[0], args[0], args[1], wide)
            vector = builder.load(address, align=16)
            out = context.get_constant_undef(signature.return_type)
            for i in range(4):
                out = builder.insert_value(out, builder.extract_element(vector, ir.Constant(I32, i)), i)
            return out

        return types.UniTuple(types.int32, 4)(w, types.int64), codegen

    @intrinsic
    def bits(typingctx, word, at, count):
        """Bits at .. at + count - 1 of a word, as int32: unsigned, whatever numba's 64-bit rules say."""

        def codegen(context, builder, signature, args):
            word, at, count = args
            mask = builder.sub(builder.shl(ir.Constant(I32, 1), count), ir.Constant(I32, 1))
            return builder.and_(builder.lshr(word, at), mask)

        return types.int32(types.int32, types.int32, types.int32), codegen

    @intrinsic
    def f16(typingctx, word):
        """float32 of the float16 in a word's low half (PTX cvt.f32.f16)."""

        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(ir.FloatType(), [I16])
            short = builder.trunc(args[0], I16)
            return builder.asm(kind, "cvt.f32.f16 $0, $1;", "=f,h", [short], False)

        return types.float32(types.int32), codegen

    @intrinsic
    def as_float(typingctx, word):
        """float32 of its bits."""

        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], ir.FloatType())

        return types.float32(types.int32), codegen

    @cuda.jit(device=True)
    def pair16(w, at):
        """int32 from two 16-bit loads, at an even offset."""
        return types.int32(u16(w, at) | (u16(w, at + 2) << 16))

    @cuda.jit(device=True)
    def warp_sum(x):
        """Sum over the 32 lanes of a warp, in every lane."""
        for shift in (16, 8, 4, 2, 1):
            x += cuda.shfl_xor_sync(0xFFFFFFFF, x, shift)
        return x

    @cuda.jit(device=True)
    def warp_max(x):
        """Largest value of the 32 lanes of a warp, in every lane."""
        for shift in (16, 8, 4, 2, 1):
            x = max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, shift))
        return x

    @cuda.jit(device=True)
    def half_warp_sum(x):
        """Sum over lanes 0 .. 15, or 16 .. 31: each lane's own half."""
        for shift in (8, 4, 2, 1):
            x += cuda.shfl_xor_sync(0xFFFFFFFF, x, shift)
        return x
