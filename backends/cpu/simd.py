"""Vector types and instructions as plain Python functions: what every CPU kernel is written in.

A type is written `f32x8` (eight float32), `i8x32`, `i16x16`, `i32x8`, any power-of-two width; integers have no sign of
their own, the op says how it reads them. Scalars are `i64` (all integers and addresses) and `f32`. `V` in a signature
is any vector type, `lit` a constant known when the kernel is compiled.

Each `Op` has two bodies. The decorated function is its meaning in numpy (its twin): tests and NUMBA_DISABLE_JIT=1 run
it. `emit` gives the LLVM instructions, once in general and where it pays per instruction set; `jit.py` uses those.
`ISA` is "avx512" (256-bit vectors with VNNI dot products; 512-bit where a kernel asks for them), "avx2", "neon" or
"scalar" (whatever LLVM makes of the general form), from the machine or from EDGELLM_ISA.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.errors import BackendUnavailable

ISAS = ("avx512", "avx2", "neon", "scalar")


@lru_cache(maxsize=1)
def host_features() -> frozenset[str]:
    """LLVM's names of this machine's instruction set extensions; empty where LLVM cannot ask (some Macs)."""
    import llvmlite.binding as llvm

    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:
        return frozenset()
    return frozenset(name for name, there in features.items() if there)


def detect_isa() -> str:
    """The best instruction set of this machine that we have kernels for."""
    features = host_features()
    if {"avx512bw", "avx512vl", "avx512vnni", "fma", "f16c"} <= features:
        return "avx512"
    if {"avx2", "fma", "f16c"} <= features:
        return "avx2"
    apple_silicon = sys.platform == "darwin" and platform.machine() == "arm64"
    return "neon" if apple_silicon or {"neon", "dotprod"} <= features else "scalar"


def chosen_isa() -> str:
    """EDGELLM_ISA, or what the machine has."""
    given = os.environ.get("EDGELLM_ISA", "")
    if given and given not in ISAS:
        raise BackendUnavailable(f"EDGELLM_ISA={given} is not known; choose one of {', '.join(ISAS)}")
    return given or detect_isa()


ISA = chosen_isa()
Vector = npt.NDArray[Any]


class Op:
    """One instruction: a numpy twin to call, a signature, and what to emit for it."""

    def __init__(self, signature: str, twin: Callable[..., Any]):
        result, params = signature.rstrip(")").split("(")
        self.result = result.strip()
        self.params = tuple(p.strip() for p in params.split(",") if p.strip())
        self.twin = twin
        self.name = twin.__name__
        self.__doc__ = twin.__doc__
        self.emitters: dict[str, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        return self.twin(*args)

    def emit(self, *isas: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: the LLVM form for these instruction sets (none named: the general form)."""

        def register(emitter: Callable[..., Any]) -> Callable[..., Any]:
            for isa in isas or ("",):
                self.emitters[isa] = emitter
            return emitter

        return register

    def emitter(self, isa: str) -> Callable[..., Any]:
        """What to emit for one instruction set."""
        return self.emitters.get(isa) or self.emitters[""]


def op(signature: str, emit: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], Op]:
    """Decorator: make an Op of a twin. `emit` is the general form where one expression says it."""

    def make(twin: Callable[..., Any]) -> Op:
        made = Op(signature, twin)
        if emit is not None:
            made.emitters[""] = emit
        return made

    return make


DTYPES = {"f32": np.float32, "f16": np.float16, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64}


def split_type(name: str) -> tuple[str, int]:
    """ "f32x8" -> ("f32", 8)."""
    element, _, count = name.partition("x")
    return element, int(count)


def view(address: int, dtype: Any, count: int) -> Vector:
    """`count` elements of memory at `address` as an array (no copy); for twins and tests."""
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer((ctypes.c_char * size).from_address(int(address)), dtype)


def registers(count: int) -> list[Any]:
    """`count` local variables, indexed by constants: `jit.py` turns `acc[2]` into one variable each."""
    return [None] * count


def unroll(count: int) -> range:
    """A loop that is written out when the kernel is compiled; its variable is a constant in the body."""
    return range(count)


f32 = np.float32


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


@op("void(i64)", lambda e, a: e.prefetch(a))
def prefetch(address: int) -> None:
    """Ask for the cache line at an address; never faults."""


# Making vectors.
def _splat(type_name: str) -> Op:
    element, count = split_type(type_name)
    scalar = "f32" if element == "f32" else "i64"

    def twin(x: Any) -> Vector:
        value = x if element == "f32" else np.array(int(x)).astype(DTYPES[element])
        return np.full(count, value, DTYPES[element])

    twin.__name__ = f"splat_{type_name}"
    twin.__doc__ = f"A {type_name} of one value."
    emit = lambda e, x: e.splat(x if element == "f32" else e.truncate(x, element), count)  # noqa: E731
    return op(f"{type_name}({scalar})", emit)(twin)


splat_f32x4 = _splat("f32x4")
splat_f32x8 = _splat("f32x8")
splat_f32x16 = _splat("f32x16")
splat_i8x16 = _splat("i8x16")
splat_i8x32 = _splat("i8x32")
splat_i8x64 = _splat("i8x64")
splat_i16x16 = _splat("i16x16")
splat_i32x8 = _splat("i32x8")
splat_i32x16 = _splat("i32x16")


def reinterpret(source: str, target: str) -> Op:
    """An Op that reads the bits of one vector type as another of the same size."""
    element = split_type(target)[0]

    def twin(x: Vector) -> Vector:
        return x.view(DTYPES[element])

    twin.__name__ = f"{source}_as_{target}"
    return op(f"{target}({source})", lambda e, x: e.bitcast(x, target))(twin)


i8x32_as_i16x16 = reinterpret("i8x32", "i16x16")
i8x32_as_i32x8 = reinterpret("i8x32", "i32x8")
i16x16_as_i8x32 = reinterpret("i16x16", "i8x32")
i32x8_as_i8x32 = reinterpret("i32x8", "i8x32")
i32x8_as_i16x16 = reinterpret("i32x8", "i16x16")
i32x8_as_f32x8 = reinterpret("i32x8", "f32x8")
f32x8_as_i32x8 = reinterpret("f32x8", "i32x8")


def permute(source: str, indices: list[int]) -> Op:
    """An Op that picks lanes by constant indices; the result has len(indices) lanes."""
    element = split_type(source)[0]
    picked = np.array(indices)

    def twin(x: Vector) -> Vector:
        return x[picked]

    twin.__name__ = f"permute_{source}"
    return op(f"{element}x{len(indices)}({source})", lambda e, x: e.shuffle(x, x, indices))(twin)


def permute2(source: str, indices: list[int]) -> Op:
    """As `permute`, over the lanes of two vectors one after the other."""
    element = split_type(source)[0]
    picked = np.array(indices)

    def twin(a: Vector, b: Vector) -> Vector:
        return np.concatenate([a, b])[picked]

    twin.__name__ = f"permute2_{source}"
    return op(f"{element}x{len(indices)}({source}, {source})", lambda e, a, b: e.shuffle(a, b, indices))(twin)


# Arithmetic, lane by lane; integers wrap.
@op("V(V, V)", lambda e, a, b: e.arithmetic("add", a, b))
def add(a: Vector, b: Vector) -> Vector:
    """a + b."""
    return a + b


@op("V(V, V)", lambda e, a, b: e.arithmetic("sub", a, b))
def sub(a: Vector, b: Vector) -> Vector:
    """a - b."""
    return a - b


@op("V(V, V)", lambda e, a, b: e.arithmetic("mul", a, b))
def mul(a: Vector, b: Vector) -> Vector:
    """a * b."""
    return a * b


@op("V(V, V)", lambda e, a, b: e.b.fdiv(a, b))
def div(a: Vector, b: Vector) -> Vector:
    """a / b of floats."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return a / b


@op("V(V, V, V)", lambda e, a, b, c: e.fma(a, b, c))
def fma(a: Vector, b: Vector, c: Vector) -> Vector:
    """a * b + c of floats, rounded once (twice where the machine has no such instruction)."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


@op("f32(f32, f32, f32)", lambda e, a, b, c: e.fma(a, b, c))
def fma_f32(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a * b + c of scalars, rounded as `fma`."""
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


@op("V(V, V)", lambda e, a, b: e.extremum("o>", a, b))
def maximum(a: Vector, b: Vector) -> Vector:
    """a where a > b, else b (floats; signed integers)."""
    return np.where(a > b, a, b)


@op("V(V, V)", lambda e, a, b: e.extremum("o<", a, b))
def minimum(a: Vector, b: Vector) -> Vector:
    """a where a < b, else b (floats; signed integers)."""
    return np.where(a < b, a, b)


@op("V(V)", lambda e, a: e.absolute(a))
def absolute(a: Vector) -> Vector:
    """|a| of floats."""
    return np.abs(a)


@op("V(V, V)", lambda e, a, b: e.b.and_(a, b))
def bit_and(a: Vector, b: Vector) -> Vector:
    """a & b of integers."""
    return a & b


@op("V(V, V)", lambda e, a, b: e.b.or_(a, b))
def bit_or(a: Vector, b: Vector) -> Vector:
    """a | b of integers."""
    return a | b


@op("V(V, V)", lambda e, a, b: e.b.xor(a, b))
def bit_xor(a: Vector, b: Vector) -> Vector:
    """a ^ b of integers."""
    return a ^ b


@op("V(V, lit)", lambda e, a, n: e.shift("shl", a, n))
def shift_left(a: Vector, n: int) -> Vector:
    """Each lane moved left by n bits."""
    return a << a.dtype.type(n)


@op("V(V, lit)", lambda e, a, n: e.shift("lshr", a, n))
def shift_right(a: Vector, n: int) -> Vector:
    """Each lane moved right by n bits, zeros coming in."""
    unsigned = a.view(f"u{a.dtype.itemsize}")
    return (unsigned >> unsigned.dtype.type(n)).view(a.dtype)


@op("V(V, V, V, V)", lambda e, a, b, x, y: e.select_less(a, b, x, y))
def select_less(a: Vector, b: Vector, x: Vector, y: Vector) -> Vector:
    """x where a < b (floats), else y."""
    return np.where(a < b, x, y)


# Conversions.
def _widen(source: str, target: str, signed: bool) -> Op:
    element = split_type(target)[0]

    def twin(x: Vector) -> Vector:
        return (x if signed else x.view(f"u{x.dtype.itemsize}")).astype(DTYPES[element])

    twin.__name__ = f"{'sign' if signed else 'zero'}_extend_{source}"
    return op(f"{target}({source})", lambda e, x: e.extend(x, target, signed))(twin)


sign_extend_i8x16 = _widen("i8x16", "i16x16", True)
zero_extend_i8x16 = _widen("i8x16", "i16x16", False)
sign_extend_i16x8 = _widen("i16x8", "i32x8", True)
zero_extend_i16x8 = _widen("i16x8", "i32x8", False)


def _int_to_float(count: int) -> Op:
    def twin(x: Vector) -> Vector:
        return x.astype(np.float32)

    twin.__name__ = f"to_f32x{count}"
    return op(f"f32x{count}(i32x{count})", lambda e, x: e.float_of_int(x, f"f32x{count}"))(twin)


to_f32x4 = _int_to_float(4)
to_f32x8 = _int_to_float(8)
to_f32x16 = _int_to_float(16)


@op("i32x8(f32x8)", lambda e, x: e.b.fptosi(e.call("llvm.rint.v8f32", "f32x8", x), e.type("i32x8")))
def round_i32x8(x: Vector) -> Vector:
    """Nearest integers, ties to even; |x| below 2^31."""
    return np.rint(x).astype(np.int32)


@op("i32x8(f32x8)", lambda e, x: e.b.fptosi(x, e.type("i32x8")))
def truncate_i32x8(x: Vector) -> Vector:
    """Towards zero; |x| below 2^31."""
    return x.astype(np.int32)


low_i8x32 = permute("i8x32", list(range(16)))
high_i8x32 = permute("i8x32", list(range(16, 32)))
low_i16x16 = permute("i16x16", list(range(8)))
high_i16x16 = permute("i16x16", list(range(8, 16)))
low_f32x16 = permute("f32x16", list(range(8)))
high_f32x16 = permute("f32x16", list(range(8, 16)))
twice_i8x16 = permute("i8x16", list(range(16)) * 2)


@op("i8x32(i32x8, i32x8, i32x8, i32x8)")
def narrow_i32x8(a: Vector, b: Vector, c: Vector, d: Vector) -> Vector:
    """The low bytes of four vectors of eight, in order: i8x32."""
    return np.concatenate([a, b, c, d]).astype(np.int8)


@narrow_i32x8.emit()
def _emit_narrow(e: Any, *parts: Any) -> Any:
    small = [e.truncate(p, "i8x8") for p in parts]
    low, high = (e.shuffle(x, y, list(range(16))) for x, y in (small[:2], small[2:]))
    return e.shuffle(low, high, list(range(32)))


# Sums over lanes: fixed trees, so that the bits never depend on how a kernel was compiled.
@op("i64(i32x8)")
def sum_i32x8(x: Vector) -> int:
    """Sum of the lanes (must fit int32)."""
    return int(x.sum(dtype=np.int32))


@sum_i32x8.emit()
def _emit_sum_i32x8(e: Any, x: Any) -> Any:
    return e.extend(e.call("llvm.vector.reduce.add.v8i32", "i32", x), "i64", signed=True)


@op("f32(f32x8)")
def sum_f32x8(x: Vector) -> np.float32:
    """((x0+x4) + (x2+x6)) + ((x1+x5) + (x3+x7))."""
    half = x[:4] + x[4:]
    pair = half[:2] + half[2:]
    return np.float32(pair[0] + pair[1])


@sum_f32x8.emit()
def _emit_sum_f32x8(e: Any, x: Any) -> Any:
    half = e.b.fadd(e.shuffle(x, x, [0, 1, 2, 3]), e.shuffle(x, x, [4, 5, 6, 7]))
    pair = e.b.fadd(e.shuffle(half, half, [0, 1]), e.shuffle(half, half, [2, 3]))
    return e.b.fadd(e.lane(pair, 0), e.lane(pair, 1))


@op("f32(f32x8, lit)", lambda e, x, i: e.lane(x, i))
def lane_f32x8(x: Vector, i: int) -> np.float32:
    """One lane."""
    return np.float32(x[i])


@op("f32(f32x16)")
def sum_f32x16(x: Vector) -> np.float32:
    """`sum_f32x8` of the two halves added lane by lane."""
    return sum_f32x8.twin(x[:8] + x[8:])


@sum_f32x16.emit()
def _emit_sum_f32x16(e: Any, x: Any) -> Any:
    return _emit_sum_f32x8(e, e.b.fadd(e.shuffle(x, x, list(range(8))), e.shuffle(x, x, list(range(8, 16)))))


@op("f32(f32x8)")
def max_f32x8(x: Vector) -> np.float32:
    """Largest lane."""
    return np.float32(x.max())


@max_f32x8.emit()
def _emit_max_f32x8(e: Any, x: Any) -> Any:
    half = e.extremum("o>", e.shuffle(x, x, [0, 1, 2, 3]), e.shuffle(x, x, [4, 5, 6, 7]))
    pair = e.extremum("o>", e.shuffle(half, half, [0, 1]), e.shuffle(half, half, [2, 3]))
    return e.extremum("o>", e.lane(pair, 0), e.lane(pair, 1))


@op("f32(f32x16)")
def max_f32x16(x: Vector) -> np.float32:
    """Largest lane."""
    return np.float32(x.max())


@max_f32x16.emit()
def _emit_max_f32x16(e: Any, x: Any) -> Any:
    low, high = e.shuffle(x, x, list(range(8))), e.shuffle(x, x, list(range(8, 16)))
    return _emit_max_f32x8(e, e.extremum("o>", low, high))


# Integer products.
@op("i16x16(i8x32, i8x32)")
def mul_pairs_u8(a: Vector, b: Vector) -> Vector:
    """Unsigned a times signed b, neighbours added, clipped to int16 (pmaddubsw)."""
    product = a.view(np.uint8).astype(np.int32) * b.astype(np.int32)
    return np.clip(product[0::2] + product[1::2], -32768, 32767).astype(np.int16)


@mul_pairs_u8.emit("avx2", "avx512")
def _emit_mul_pairs_u8(e: Any, a: Any, b: Any) -> Any:
    return e.call("llvm.x86.avx2.pmadd.ub.sw", "i16x16", a, b)


@mul_pairs_u8.emit()
def _emit_mul_pairs_u8_general(e: Any, a: Any, b: Any) -> Any:
    product = e.b.mul(e.extend(a, "i16x32", signed=False), e.extend(b, "i16x32", signed=True))
    even, odd = e.shuffle(product, product, list(range(0, 32, 2))), e.shuffle(product, product, list(range(1, 32, 2)))
    return e.call("llvm.sadd.sat.v16i16", "i16x16", even, odd)


@op("i32x8(i16x16, i16x16)")
def mul_pairs_i16(a: Vector, b: Vector) -> Vector:
    """Signed products of int16, neighbours added in int32 (pmaddwd)."""
    product = a.astype(np.int32) * b.astype(np.int32)
    return product[0::2] + product[1::2]


@mul_pairs_i16.emit("avx2", "avx512")
def _emit_mul_pairs_i16(e: Any, a: Any, b: Any) -> Any:
    return e.call("llvm.x86.avx2.pmadd.wd", "i32x8", a, b)


@mul_pairs_i16.emit()
def _emit_mul_pairs_i16_general(e: Any, a: Any, b: Any) -> Any:
    product = e.b.mul(e.extend(a, "i32x16", signed=True), e.extend(b, "i32x16", signed=True))
    return e.b.add(
        e.shuffle(product, product, list(range(0, 16, 2))), e.shuffle(product, product, list(range(1, 16, 2)))
    )


@op("i32x8(i32x8, i8x32, i8x32)")
def dot_u7(acc: Vector, a: Vector, b: Vector) -> Vector:
    """acc + sums of four products, a in 0..127 times signed b."""
    product = a.view(np.uint8).astype(np.int32) * b.astype(np.int32)
    return acc + product.reshape(8, 4).sum(1, dtype=np.int32)


@dot_u7.emit()
def _emit_dot_u7(e: Any, acc: Any, a: Any, b: Any) -> Any:
    pairs = mul_pairs_u8.emitter(ISA)(e, a, b)
    return e.b.add(acc, mul_pairs_i16.emitter(ISA)(e, pairs, e.constant("i16x16", 1)))


@dot_u7.emit("avx512")
def _emit_dot_u7_vnni(e: Any, acc: Any, a: Any, b: Any) -> Any:
    return e.vnni_dot(acc, a, b)


@dot_u7.emit("neon")
def _emit_dot_u7_neon(e: Any, acc: Any, a: Any, b: Any) -> Any:
    return e.by_halves("llvm.aarch64.neon.sdot.v4i32.v16i8", acc, a, b)


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
