"""Ops that touch memory: scalars, vectors, widening loads, and what threads share. Any alignment will do.

Part of simd.py, which is where kernels import them from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.backends.cpu.simd_op import DTYPES, Op, Vector, op, split_type, view


# Scalars in memory. Unaligned addresses are fine everywhere.
def _scalar_load(name: str, memory: str, dtype: Any, signed: bool) -> Op:
    def twin(address: int) -> int:
        return int(view(address, dtype, 1)[0])

    twin.__name__ = name
    twin.__doc__ = f"The {np.dtype(dtype)} at an address, as int64."
    return op("i64(i64)", lambda e, a: e.extend(e.load(a, memory), "i64", signed))(twin)


load_i8 = _scalar_load("load_i8", "i8", np.int8, True)
load_u8 = _scalar_load("load_u8", "i8", np.uint8, False)
load_i16 = _scalar_load("load_i16", "i16", np.int16, True)
load_u16 = _scalar_load("load_u16", "i16", np.uint16, False)
load_i32 = _scalar_load("load_i32", "i32", np.int32, True)
load_u32 = _scalar_load("load_u32", "i32", np.uint32, False)
load_i64 = _scalar_load("load_i64", "i64", np.int64, True)


@op("f32(i64)", lambda e, a: e.load(a, "f32"))
def load_f32(address: int) -> np.float32:
    """The float32 at an address."""
    return np.float32(view(address, np.float32, 1)[0])


@op("f32(i64)", lambda e, a: e.half_to_float(e.load(a, "i16"), 1))
def load_f16(address: int) -> np.float32:
    """The float16 at an address, as float32."""
    return np.float32(view(address, np.float16, 1)[0])


@op("void(i64, f32)", lambda e, a, x: e.store(a, x))
def store_f32(address: int, x: np.float32) -> None:
    """Write a float32."""
    view(address, np.float32, 1)[0] = x


@op("void(i64, i64)", lambda e, a, x: e.store(a, x))
def store_i64(address: int, x: int) -> None:
    """Write an int64."""
    view(address, np.int64, 1)[0] = x


@op("void(i64, i64)", lambda e, a, x: e.store(a, e.truncate(x, "i32")))
def store_i32(address: int, x: int) -> None:
    """Write the low 32 bits."""
    view(address, np.uint32, 1)[0] = int(x) & 0xFFFFFFFF


@op("void(i64, i64)", lambda e, a, x: e.store(a, e.truncate(x, "i16")))
def store_i16(address: int, x: int) -> None:
    """Write the low 16 bits."""
    view(address, np.uint16, 1)[0] = int(x) & 0xFFFF


@op("void(i64, i64)", lambda e, a, x: e.store(a, e.truncate(x, "i8")))
def store_i8(address: int, x: int) -> None:
    """Write the low 8 bits."""
    view(address, np.uint8, 1)[0] = int(x) & 0xFF


@op("f32(i64)", lambda e, x: e.bitcast(e.truncate(x, "i32"), "f32"))
def float_of_bits(bits: int) -> np.float32:
    """The float32 whose bits are the low 32 of an integer (how floats travel in kernel arguments)."""
    return np.float32(np.array(int(bits) & 0xFFFFFFFF, np.uint32).view(np.float32))


@op("f32(i64)", lambda e, x: e.float_of_int(x, "f32"))
def float_of_int(x: int) -> np.float32:
    """An integer rounded to float32."""
    return np.float32(x)


@op("f32(f32)", lambda e, x: e.call("llvm.sqrt.f32", "f32", x))
def sqrt(x: np.float32) -> np.float32:
    """Correctly rounded square root."""
    return np.float32(np.sqrt(np.float32(x)))


# Vectors in memory.
def _load(type_name: str) -> Op:
    element, count = split_type(type_name)

    def twin(address: int) -> Vector:
        return view(address, DTYPES[element], count).copy()

    twin.__name__ = f"load_{type_name}"
    twin.__doc__ = f"A {type_name} from memory."
    return op(f"{type_name}(i64)", lambda e, a: e.load(a, type_name))(twin)


load_f32x4 = _load("f32x4")
load_f32x8 = _load("f32x8")
load_f32x16 = _load("f32x16")
load_i8x16 = _load("i8x16")
load_i8x32 = _load("i8x32")
load_i8x64 = _load("i8x64")
load_i16x8 = _load("i16x8")
load_i16x16 = _load("i16x16")
load_i32x4 = _load("i32x4")
load_i32x8 = _load("i32x8")
load_i32x16 = _load("i32x16")


@op("f32x16(i64)", lambda e, a: e.float_of_int(e.extend(e.load(a, "i8x16"), "i32x16", signed=True), "f32x16"))
def load_i8x16_as_f32x16(address: int) -> Vector:
    """Sixteen int8 from memory, as float32."""
    return view(address, np.int8, 16).astype(np.float32)


@op("void(i64, V)", lambda e, a, x: e.store(a, x))
def store(address: int, x: Vector) -> None:
    """Write a vector."""
    view(address, x.dtype, len(x))[:] = x


def _load_half(count: int) -> Op:
    def twin(address: int) -> Vector:
        return view(address, np.float16, count).astype(np.float32)

    twin.__name__ = f"load_f16x{count}"
    twin.__doc__ = f"{count} float16 from memory, widened to float32."
    return op(f"f32x{count}(i64)", lambda e, a: e.half_to_float(e.load(a, f"i16x{count}"), count))(twin)


load_f16x8 = _load_half(8)
load_f16x16 = _load_half(16)


@op("f32x8(i64)")
def load_bf16x8(address: int) -> Vector:
    """Eight bfloat16 (upper halves of float32) from memory, as float32."""
    return (view(address, np.uint16, 8).astype(np.uint32) << np.uint32(16)).view(np.float32)


@load_bf16x8.emit()
def _emit_load_bf16x8(e: Any, address: Any) -> Any:
    wide = e.extend(e.load(address, "i16x8"), "i32x8", signed=False)
    return e.bitcast(e.b.shl(wide, e.constant("i32x8", 16)), "f32x8")


@op("void(i64, f32x8)", lambda e, a, x: e.store(a, e.float_to_half(x, 8)))
def store_f16x8(address: int, x: Vector) -> None:
    """Round eight float32 to float16 (to nearest, ties to even) and write them."""
    with np.errstate(over="ignore"):
        view(address, np.float16, 8)[:] = x.astype(np.float16)


@op("void(i64)", lambda e, a: e.prefetch(a, 1))
def prefetch(address: int) -> None:
    """Ask for the cache line at an address; never faults."""


@op("void(i64)", lambda e, a: e.prefetch(a, 3))
def prefetch_near(address: int) -> None:
    """As `prefetch`, into the first-level cache."""


@op("void(i64)")
def prefetch_far(address: int) -> None:
    """As `prefetch`, into the second-level cache only; keeps its place between the loads around it."""


@prefetch_far.emit()
def _emit_prefetch_far(e: Any, address: Any) -> None:
    e.prefetch(address, 2)
    e.barrier()


# Between threads.
@op("i64(i64, i64)", lambda e, a, x: e.atomic_add(a, x))
def atomic_add(address: int, x: int) -> int:
    """Add to the int64 at an address, sequentially consistent; returns what was there before."""
    cell = view(address, np.int64, 1)
    before = int(cell[0])
    cell[0] = before + x
    return before


@op("i64(i64, i64, i64)", lambda e, a, expected, x: e.compare_exchange(a, expected, x))
def compare_exchange(address: int, expected: int, x: int) -> int:
    """Write x if the int64 at an address is `expected`, sequentially consistent; returns what was there before."""
    cell = view(address, np.int64, 1)
    before = int(cell[0])
    if before == expected:
        cell[0] = x
    return before


@op("i64(i64)", lambda e, a: e.atomic_load(a))
def atomic_load(address: int) -> int:
    """The int64 at an address, acquire."""
    return int(view(address, np.int64, 1)[0])


@op("void(i64, i64)", lambda e, a, x: e.atomic_store(a, x))
def atomic_store(address: int, x: int) -> None:
    """Write an int64, release."""
    view(address, np.int64, 1)[0] = x


@op("void()", lambda e: None)
def pause() -> None:
    """Spin-wait hint."""


@pause.emit("avx2", "avx512")
def _emit_pause_x86(e: Any) -> None:
    e.call("llvm.x86.sse2.pause", "void")


@pause.emit("neon")
def _emit_pause_neon(e: Any) -> None:
    e.call("llvm.aarch64.hint", "void", e.constant("i32", 1))
