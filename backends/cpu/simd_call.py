"""Calls of C functions by their addresses, from compiled code."""

from __future__ import annotations

import ctypes

from edgellm.backends.cpu.simd_op import Op, op

__all__ = ["call_int", "call_kernel", "call_plain"]


def _call(function: int, *args: int) -> None:
    """Call a C function `void f(int64 ...)` by its address."""
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(args))(function)(*args)


call_kernel: Op = op("void(i64, i64, i64, i64, i64)", lambda e, f, *args: e.call_address(f, "void", *args))(_call)
call_plain: Op = op("void(i64)", lambda e, f: e.call_address(f, "void"))(_call)


@op("i64(i64)", lambda e, f: e.extend(e.call_address(f, "i32"), "i64", signed=True))
def call_int(function: int) -> int:
    """Call a C function `int f(void)` by its address."""
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(function)())
