"""What an instruction is to us: a numpy twin and what to emit for it; and which instruction set this process uses.

`ISA` is "avx512" (256-bit vectors with VNNI dot products; 512-bit where a kernel asks for them), "avx2", "neon" or
"scalar" (whatever LLVM makes of the general form), from the machine or from EDGELLM_ISA. Where the machine has AMX,
"avx512" uses that as well, unless EDGELLM_ISA asks for it by name (simd_amx.py).
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

__all__ = [
    "DTYPES",
    "ISA",
    "Op",
    "Vector",
    "chosen_isa",
    "detect_isa",
    "f32",
    "host_features",
    "op",
    "registers",
    "split_type",
    "unroll",
    "view",
]

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
