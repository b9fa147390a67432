"""LLVM instructions by name, over llvmlite's builder: what the `emit` forms in simd.py are written with."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgellm.backends.cpu.simd import split_type

SCALARS = {
    "void": ir.VoidType(),
    "f32": ir.FloatType(),
    "f16": ir.HalfType(),
    "i8": ir.IntType(8),
    "i16": ir.IntType(16),
    "i32": ir.IntType(32),
    "i64": ir.IntType(64),
}


def llvm_type(name: str) -> Any:
    """The LLVM type of a type name in a signature."""
    if name in SCALARS:
        return SCALARS[name]
    element, count = split_type(name)
    return ir.VectorType(SCALARS[element], count)


class Emitter:
    """Wraps the builder at the place where an Op is called."""

    def __init__(self, builder: Any, isa: str):
        self.b = builder
        self.isa = isa

    def type(self, name: str) -> Any:
        """As `llvm_type`."""
        return llvm_type(name)

    def constant(self, name: str, value: float) -> Any:
        """A constant; every lane of a vector."""
        kind = llvm_type(name)
        lanes = [value] * kind.count if isinstance(kind, ir.VectorType) else value
        return ir.Constant(kind, lanes)

    def load(self, address: Any, name: str) -> Any:
        """Unaligned load."""
        kind = llvm_type(name)
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=1)

    def store(self, address: Any, value: Any) -> None:
        """Unaligned store."""
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=1)

    def call(self, name: str, result: str, *args: Any) -> Any:
        """Call an LLVM intrinsic."""
        kind = ir.FunctionType(llvm_type(result), [a.type for a in args])
        module = self.b.module
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.b.call(function, args)

    def call_address(self, address: Any, result: str, *args: Any) -> Any:
        """Call a C function by its address."""
        kind = ir.FunctionType(llvm_type(result), [a.type for a in args])
        return self.b.call(self.b.inttoptr(address, kind.as_pointer()), args)

    def bitcast(self, x: Any, name: str) -> Any:
        """Same bits, other type."""
        return self.b.bitcast(x, llvm_type(name))

    def extend(self, x: Any, name: str, signed: bool) -> Any:
        """Widen integers."""
        kind = llvm_type(name)
        if x.type == kind:
            return x
        return self.b.sext(x, kind) if signed else self.b.zext(x, kind)

    def truncate(self, x: Any, name: str) -> Any:
        """Narrow integers."""
        kind = llvm_type(name)
        return x if x.type == kind else self.b.trunc(x, kind)

    def float_of_int(self, x: Any, name: str) -> Any:
        """Signed integers to floats."""
        return self.b.sitofp(x, llvm_type(name))

    def half_to_float(self, bits: Any, count: int) -> Any:
        """float16 bits to float32. Without an instruction for it, by integer arithmetic (no library call)."""
        suffix = f"x{count}" if count > 1 else ""
        if self.isa != "scalar":
            return self.b.fpext(self.bitcast(bits, f"f16{suffix}"), llvm_type(f"f32{suffix}"))
        wide = self.extend(bits, f"i32{suffix}", signed=False)
        sign = self.b.shl(self.b.and_(wide, self.constant(f"i32{suffix}", 0x8000)), self.constant(f"i32{suffix}", 16))
        body = self.b.shl(self.b.and_(wide, self.constant(f"i32{suffix}", 0x7FFF)), self.constant(f"i32{suffix}", 13))
        # The exponent's bias differs by 112: multiplying by 2^112 puts it right, subnormals included; the largest
        # exponent (infinity, NaN) is then set by hand.
        scaled = self.b.fmul(self.bitcast(body, f"f32{suffix}"), self.constant(f"f32{suffix}", 2.0**112))
        special = self.b.icmp_unsigned(">=", body, self.constant(f"i32{suffix}", 0x0F800000))
        infinite = self.b.or_(body, self.constant(f"i32{suffix}", 0x7F800000))
        value = self.b.select(special, infinite, self.bitcast(scaled, f"i32{suffix}"))
        return self.bitcast(self.b.or_(value, sign), f"f32{suffix}")

    def float_to_half(self, x: Any, count: int) -> Any:
        """float32 to float16, ties to even."""
        if self.isa in ("avx2", "avx512"):
            return self.call(
                f"llvm.x86.vcvtps2ph.{count * 16 // 128 * 128 * 2}", f"i16x{count}", x, self.constant("i32", 0)
            )
        if self.isa == "neon":
            return self.bitcast(self.b.fptrunc(x, llvm_type(f"f16x{count}")), f"i16x{count}")
        return self._float_to_half_by_integers(x, count)

    def _float_to_half_by_integers(self, x: Any, count: int) -> Any:
        i32, f32 = f"i32x{count}", f"f32x{count}"
        bits = self.bitcast(x, i32)

        def c(value: int) -> Any:
            return self.constant(i32, value)

        body = self.b.and_(bits, c(0x7FFFFFFF))
        sign = self.b.and_(self.b.lshr(bits, c(16)), c(0x8000))
        # Normal range: rebias and round to even with an integer add. Subnormals: let a float add do the rounding.
        odd = self.b.and_(self.b.lshr(body, c(13)), c(1))
        normal = self.b.lshr(self.b.add(self.b.add(body, c(0xC8000FFF - (1 << 32))), odd), c(13))
        magic = self.b.fadd(self.bitcast(body, f32), self.constant(f32, 0.5))
        tiny = self.b.sub(self.bitcast(magic, i32), c(0x3F000000))
        value = self.b.select(self.b.icmp_unsigned("<", body, c(0x38800000)), tiny, normal)
        value = self.b.select(self.b.icmp_unsigned(">=", body, c(0x477FF000)), c(0x7C00), value)
        value = self.b.select(self.b.icmp_unsigned(">", body, c(0x7F800000)), c(0x7E00), value)
        return self.truncate(self.b.or_(value, sign), f"i16x{count}")

    def splat(self, x: Any, count: int) -> Any:
        """A vector of one value."""
        kind = ir.VectorType(x.type, count)
        first = self.b.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
        return self.shuffle(first, first, [0] * count)

    def shuffle(self, a: Any, b: Any, indices: list[int]) -> Any:
        """Lanes of a then b by index."""
        return self.b.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), list(indices)))

    def lane(self, x: Any, i: int) -> Any:
        """One lane."""
        return self.b.extract_element(x, ir.Constant(ir.IntType(32), i))

    def arithmetic(self, name: str, a: Any, b: Any) -> Any:
        """add, sub or mul of whichever kind the lanes are."""
        floats = isinstance(getattr(a.type, "element", a.type), ir.FloatType)
        return getattr(self.b, f"f{name}" if floats else name)(a, b)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """One rounding where the machine can (a library call otherwise, so two roundings there)."""
        if self.isa == "scalar":
            return self.b.fadd(self.b.fmul(a, b), c)
        if isinstance(a.type, ir.VectorType):
            return self.call(f"llvm.fma.v{a.type.count}f32", f"f32x{a.type.count}", a, b, c)
        return self.call("llvm.fma.f32", "f32", a, b, c)

    def extremum(self, comparison: str, a: Any, b: Any) -> Any:
        """a where a compares so with b, else b."""
        sign = comparison[1:]
        floats = isinstance(getattr(a.type, "element", a.type), ir.FloatType)
        chosen = self.b.fcmp_ordered(sign, a, b) if floats else self.b.icmp_signed(sign, a, b)
        return self.b.select(chosen, a, b)

    def absolute(self, x: Any) -> Any:
        """Clear the sign bit."""
        count = x.type.count
        return self.call(f"llvm.fabs.v{count}f32", f"f32x{count}", x)

    def shift(self, name: str, x: Any, n: int) -> Any:
        """Every lane by a constant."""
        return getattr(self.b, name)(x, ir.Constant(x.type, [n] * x.type.count))

    def select_less(self, a: Any, b: Any, x: Any, y: Any) -> Any:
        """x where a < b else y."""
        return self.b.select(self.b.fcmp_ordered("<", a, b), x, y)

    def prefetch(self, address: Any, level: int) -> None:
        """Read into cache `level` (1, 2) and those below it."""
        i32 = ir.IntType(32)
        pointer = self.b.inttoptr(address, ir.IntType(8).as_pointer())
        flags = [ir.Constant(i32, 0), ir.Constant(i32, 4 - level), ir.Constant(i32, 1)]
        self.call("llvm.prefetch.p0", "void", pointer, *flags)

    def barrier(self) -> None:
        """Loads before this place stay before it, those after it after it (for the compiler; no instruction)."""
        self.b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)

    def instructions(self, text: str, *words: Any) -> None:
        """Assembly over int64 operands $0, $1 ...; it may read and write any memory."""
        kind = ir.FunctionType(ir.VoidType(), [w.type for w in words])
        self.b.asm(kind, text, ",".join(["r"] * len(words) + ["~{memory}"]), list(words), True)

    def opaque(self, x: Any) -> Any:
        """x in a 512-bit register; LLVM does not look behind it."""
        return self.b.asm(ir.FunctionType(x.type, [x.type]), "", "=v,0", [x], False)

    def together(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Two 512-bit vectors as they are, neither ready before the other in LLVM's eyes."""
        both = ir.LiteralStructType([x.type, y.type])
        result = self.b.asm(ir.FunctionType(both, [x.type, y.type]), "", "=v,=v,0,1", [x, y], False)
        return self.b.extract_value(result, 0), self.b.extract_value(result, 1)

    def vnni_dot(self, acc: Any, a: Any, b: Any) -> Any:
        """vpdpbusd on 256 or 512 bits; older LLVMs declare its byte operands as int32 lanes."""
        import llvmlite.binding as llvm

        bits = acc.type.count * 32
        if llvm.llvm_version_info[0] < 22:
            a, b = (self.bitcast(x, f"i32x{bits // 32}") for x in (a, b))
        return self.call(f"llvm.x86.avx512.vpdpbusd.{bits}", f"i32x{bits // 32}", acc, a, b)

    def by_halves(self, name: str, acc: Any, a: Any, b: Any) -> Any:
        """A 128-bit NEON dot product on each half of 256-bit operands."""
        low, high = list(range(16)), list(range(16, 32))
        halves = []
        for lanes, bytes_ in (([0, 1, 2, 3], low), ([4, 5, 6, 7], high)):
            parts = self.shuffle(acc, acc, lanes), self.shuffle(a, a, bytes_), self.shuffle(b, b, bytes_)
            halves.append(self.call(name, "i32x4", *parts))
        return self.shuffle(halves[0], halves[1], list(range(8)))

    def _pointer(self, address: Any) -> Any:
        return self.b.inttoptr(address, ir.IntType(64).as_pointer())

    def atomic_add(self, address: Any, x: Any) -> Any:
        """Fetch and add."""
        return self.b.atomic_rmw("add", self._pointer(address), x, "seq_cst")

    def compare_exchange(self, address: Any, expected: Any, x: Any) -> Any:
        """Compare and swap; the old value."""
        pair = self.b.cmpxchg(self._pointer(address), expected, x, "seq_cst", "seq_cst")
        return self.b.extract_value(pair, 0)

    def atomic_load(self, address: Any) -> Any:
        """Acquire."""
        return self.b.load_atomic(self._pointer(address), "acquire", 8)

    def atomic_store(self, address: Any, x: Any) -> Any:
        """Release."""
        return self.b.store_atomic(x, self._pointer(address), "release", 8)
