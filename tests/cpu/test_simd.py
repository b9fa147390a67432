"""Every Op of simd.py: the compiled form against its numpy twin (integers equal, floats within 2 ulp)."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.backends.cpu import simd
from edgellm.backends.cpu.jit import Kernel, Library, kernel
from edgellm.backends.cpu.simd import Op, split_type

SKIP = {"prefetch", "prefetch_near", "prefetch_far", "pause"}
SKIP |= {"atomic_add", "atomic_load", "atomic_store", "compare_exchange"}
OPS = {name: item for name, item in vars(simd).items() if isinstance(item, Op) and name not in SKIP}
GENERIC = {"div": "f32x8", "fma": "f32x8", "absolute": "f32x8", "select_less": "f32x8", "store": "f32x8"}
INTEGER = {"bit_and", "bit_or", "bit_xor", "shift_left", "shift_right"}
LOADS = {t: getattr(simd, f"load_{t}") for t in ("f32", "i64", "f32x4", "f32x8", "f32x16", "i8x16", "i8x32", "i8x64")}
LOADS |= {t: getattr(simd, f"load_{t}") for t in ("i16x8", "i16x16", "i32x4", "i32x8", "i32x16")}
STORES = {"f32": simd.store_f32, "i64": simd.store_i64}


def vector_type(name: str) -> str:
    return GENERIC.get(name) or ("i16x16" if name in INTEGER else "f32x8")


def caller(name: str, item: Op) -> Kernel:
    """A kernel that loads the Op's operands from args[1], 64 bytes each, and stores its result at args[0]."""
    kinds = [vector_type(name) if p == "V" else p for p in item.params]
    loads = [None if k == "lit" else LOADS.get(k) for k in kinds]
    result = vector_type(name) if item.result == "V" else item.result
    write = STORES.get(result, simd.store)
    read, count = simd.load_i64, len(kinds)
    memory = kinds == ["i64"] and name.startswith("load_")
    first, second, third, fourth = (loads + [simd.load_i64] * 4)[:4]

    def one(args: int, begin: int, end: int, scratch: int) -> None:
        write(read(args), item(first(read(args + 8))))

    def address(args: int, begin: int, end: int, scratch: int) -> None:
        write(read(args), item(read(args + 8)))

    def shift(args: int, begin: int, end: int, scratch: int) -> None:
        write(read(args), item(first(read(args + 8)), 3))

    def two(args: int, begin: int, end: int, scratch: int) -> None:
        write(read(args), item(first(read(args + 8)), second(read(args + 8) + 64)))

    def three(args: int, begin: int, end: int, scratch: int) -> None:
        base = read(args + 8)
        write(read(args), item(first(base), second(base + 64), third(base + 128)))

    def four(args: int, begin: int, end: int, scratch: int) -> None:
        base = read(args + 8)
        write(read(args), item(first(base), second(base + 64), third(base + 128), fourth(base + 192)))

    def write_only(args: int, begin: int, end: int, scratch: int) -> None:
        item(read(args), second(read(args + 8) + 64))

    shapes = {1: address if memory else one, 2: shift if kinds[1:] == ["lit"] else two, 3: three, 4: four}
    return kernel(write_only if result == "void" else shapes[count], f"test_op_{name}")


def outputs(name: str, item: Op, operands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    made = caller(name, item)
    results = []
    for function in (Library().function(made), made):
        out = np.zeros(64, np.uint8)
        args = np.array([out.ctypes.data, operands.ctypes.data], np.int64)
        function(args.ctypes.data, 0, 1, 0)
        results.append(out)
    return results[0], results[1]


@pytest.mark.kernel
@pytest.mark.parametrize("name", sorted(OPS))
def test_twin(name):
    item = OPS[name]
    seed = 11
    rng = np.random.default_rng(seed)
    kinds = [vector_type(name) if p == "V" else p for p in item.params]
    result = vector_type(name) if item.result == "V" else item.result
    for trial in range(3):
        operands = np.zeros(256, np.uint8)
        for i, kind in enumerate(kinds):
            element = kind if kind in ("f32", "i64", "lit") else split_type(kind)[0]
            part = operands[64 * i : 64 * i + 64]
            if element == "f32":
                part[:] = rng.standard_normal(16).astype(np.float32).view(np.uint8) if trial else 0
                if name == "sqrt":
                    part.view(np.float32)[:] = np.abs(part.view(np.float32))
            else:
                part[:] = rng.integers(0, 256, 64)
        if name == "dot_u7":
            operands[64:128] &= 127
        if "f16" in name and name.startswith("load"):
            operands[:64] = rng.standard_normal(32).astype(np.float16).view(np.uint8)
        compiled, plain = outputs(name, item, operands)
        element = result if result in ("f32", "i64", "void") else split_type(result)[0]
        if element == "f32":
            np.testing.assert_array_max_ulp(compiled.view(np.float32), plain.view(np.float32), 2)
        else:
            assert (compiled == plain).all(), (name, seed, trial)


@pytest.mark.kernel
def test_half_conversions_at_the_edges():
    """Subnormals, overflow, infinities, ties: against numpy's own float16."""
    values = np.array([6e-8, -3e-6, 65519.0, 65520.0, np.inf, -np.inf, 1.00048828125, 0.0], np.float32)
    operands = np.zeros(256, np.uint8)
    operands[64:96] = values.view(np.uint8)
    compiled, _ = outputs("store_f16x8", simd.store_f16x8, operands)
    with np.errstate(over="ignore"):
        assert (compiled[:16].view(np.float16) == values.astype(np.float16)).all()
    operands[:16] = compiled[:16]
    widened, _ = outputs("load_f16x8", simd.load_f16x8, operands)
    assert (widened[:32].view(np.float32) == compiled[:16].view(np.float16).astype(np.float32)).all()
