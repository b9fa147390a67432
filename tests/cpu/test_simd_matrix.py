"""Ops of the matrix kernels: the compiled form against its numpy twin; a dot product against hand arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.backends.cpu import simd, simd_512, simd_amx, simd_dot, simd_pack, simd_wide
from edgellm.backends.cpu.jit import Library, kernel
from edgellm.backends.cpu.simd import Op, load_i64, split_type, store

pytestmark = pytest.mark.kernel
SEED = 13
MODULES = (simd_wide, simd_dot, simd_pack, *([simd_512, simd_amx] if simd.ISA == "avx512" else []))
OPS = {n: o for m in MODULES for n, o in vars(m).items() if isinstance(o, Op) and getattr(simd, n, None) is not o}
VECTOR = {"absolute_bytes": "i8x32", "negate_where": "i8x32", "shifted": "i32x8", "opaque": "i8x64"}
LOADS = {
    o.result: o for o in [*vars(simd).values(), *vars(simd_wide).values()] if isinstance(o, Op) and "load_" in o.name
}
SMALL_CODES = {"dot_unsigned", "dot_scaled"}  # their first bytes must be 0..127
SIMPLE = sorted(
    n for n, o in OPS.items() if all(p == "V" or p in LOADS for p in o.params) and "x" in o.result + "".join(o.params)
)


def run(name: str, item: Op, kinds: list[str], result: str, operands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The result of the compiled Op and of its twin; operand i lies at 64 i."""
    loads = [LOADS[k] for k in kinds] * 4
    first, second, third, fourth = loads[:4]
    write = simd.store_f32 if result == "f32" else store

    def one(args: int, begin: int, end: int, scratch: int) -> None:
        write(load_i64(args), item(first(load_i64(args + 8))))

    def memory(args: int, begin: int, end: int, scratch: int) -> None:
        write(load_i64(args), item(load_i64(args + 8)))

    def two(args: int, begin: int, end: int, scratch: int) -> None:
        x = load_i64(args + 8)
        write(load_i64(args), item(first(x), second(x + 64)))

    def three(args: int, begin: int, end: int, scratch: int) -> None:
        x = load_i64(args + 8)
        write(load_i64(args), item(first(x), second(x + 64), third(x + 128)))

    def four(args: int, begin: int, end: int, scratch: int) -> None:
        x = load_i64(args + 8)
        write(load_i64(args), item(first(x), second(x + 64), third(x + 128), fourth(x + 192)))

    single = memory if name.startswith(("load_", "broadcast_")) else one
    made = kernel((single, two, three, four)[len(kinds) - 1], f"test_matrix_{name}")
    results = []
    for function in (Library().function(made), made):
        out = np.zeros(64, np.uint8)
        args = np.array([out.ctypes.data, operands.ctypes.data], np.int64)
        function(args.ctypes.data, 0, 1, 0)
        results.append(out)
    return results[0], results[1]


@pytest.mark.parametrize("name", SIMPLE)
def test_twin(name):
    item, rng = OPS[name], np.random.default_rng(SEED)
    kinds = [VECTOR.get(name, p) if p == "V" else p for p in item.params]
    result = VECTOR.get(name, item.result) if item.result == "V" else item.result
    operands = np.zeros(512, np.uint8)
    for i, kind in enumerate(kinds):
        element = kind if kind in ("i64", "f32") else split_type(kind)[0]
        part = operands[64 * i : 64 * i + 64]
        if element == "f32":
            part[:] = rng.standard_normal(16).astype(np.float32).view(np.uint8)
        elif element in ("i8", "i64"):
            part[:] = rng.integers(0, 256, 64)
            part[part == 128] = 7  # activations are never -128
        else:
            part[:] = rng.integers(0, 120, 64)  # no NaN among halves, scales that do not overflow
    if name in SMALL_CODES:
        operands[64:128] &= 127
        operands[192:256] = np.repeat(rng.integers(-64, 64, 16).astype(np.int16), 2).view(np.uint8)
    if name == "dot_scaled_signed":
        operands[192:256] = np.repeat(rng.integers(-64, 64, 16).astype(np.int16), 2).view(np.uint8)
    if name.startswith("lookup") or "lookup" in item.name:
        operands[:64] &= 15
    if name.endswith(("_of_four", "_of_eight")) or name == "load_pair_in_half":  # addresses
        operands[256:] = rng.integers(0, 120, 256)
        operands[:256].view(np.int64)[::8] = operands.ctypes.data + 256 + 38 * np.arange(4)
    if name in ("load_rows_of_four", "load_two_of_eight"):  # an address and a stride
        operands[64:72].view(np.int64)[0] = 38
    if name == "shifted_down":  # bits
        operands[64:72].view(np.int64)[0] = 5
    if name == "exponents_to_floats":
        operands[:64] = rng.integers(0, 255, 16).astype(np.int32).view(np.uint8)
    compiled, plain = run(name, item, kinds, result, operands)
    if result == "f32" or result.startswith("f32"):
        np.testing.assert_array_max_ulp(compiled.view(np.float32), plain.view(np.float32), 2)
    else:
        assert (compiled == plain).all(), (name, SEED)


def test_dot_by_hand():
    """Four products per lane: 127 * 127 * 4 fits no int16, so this shows a saturating instruction."""
    w, x = np.full(256, 127, np.int8), np.full(256, -127, np.int8)
    lanes = simd_wide.LANES
    assert (simd_dot.dot_unsigned(np.ones(lanes, np.int32), w[: 4 * lanes], x[: 4 * lanes]) == 1 - 4 * 127 * 127).all()
    operands = np.zeros(512, np.uint8)
    operands[64:128], operands[128:192] = 127, 129
    kinds = [simd_wide.INTS, simd_wide.BYTES, simd_wide.BYTES]
    compiled, _ = run("dot", simd_dot.dot_unsigned, kinds, simd_wide.INTS, operands)
    assert (compiled.view(np.int32)[:lanes] == -4 * 127 * 127).all()


@pytest.mark.skipif(not simd_amx.HAS_TILES, reason="no tile registers")
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("depth", simd_amx.DEPTHS)
def test_tile_products_are_matrix_products(depth, lanes):
    """Rows further apart than they are long; -128 and 127 included."""
    rng = np.random.default_rng(SEED)
    left = rng.integers(-128, 128, (16, 80), dtype=np.int8)
    right = rng.integers(-128, 128, (depth, lanes), dtype=np.int8)
    left[0, :depth], right[:, 0] = -128, -128
    stored = np.ascontiguousarray(right.reshape(depth // 4, 4, lanes).transpose(0, 2, 1))
    expected = left[:, :depth].astype(np.int64) @ right.astype(np.int64)
    tiles_on, tile_products, tiles_off = simd_amx.tiles_on, simd_amx.tile_products, simd_amx.tiles_off

    def products(args: int, begin: int, end: int, scratch: int) -> None:
        tiles_on(scratch, lanes)
        tile_products(load_i64(args), 80, load_i64(args + 8), load_i64(args + 16), depth, lanes)
        tiles_off()

    for function in (Library().function(kernel(products, f"test_tiles_{depth}_{lanes}")), products):
        out, spare = np.zeros((16, lanes), np.int32), np.zeros(64, np.uint8)
        args = np.array([left.ctypes.data, stored.ctypes.data, out.ctypes.data])
        function(args.ctypes.data, 0, 1, spare.ctypes.data)
        assert (out == expected).all()


@pytest.mark.skipif(not simd_amx.HAS_TILES, reason="no tile registers")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_tile_sums_are_matrix_products(count):
    """One left operand, several right ones; -128 and 127 included."""
    rng = np.random.default_rng(SEED)
    left, right = rng.integers(-128, 128, (16, 256), np.int8), rng.integers(-128, 128, (count, 256, 16), np.int8)
    left[0], right[:, :, 0] = -128, -128
    stored = np.ascontiguousarray(right.reshape(count, 64, 4, 16).transpose(0, 1, 3, 2))
    expected = left.astype(np.int64) @ right.astype(np.int64)
    square_tiles_on, tile_sums, tiles_off = simd_amx.square_tiles_on, simd_amx.tile_sums, simd_amx.tiles_off

    def sums(args: int, begin: int, end: int, scratch: int) -> None:
        square_tiles_on(scratch)
        tile_sums(load_i64(args), load_i64(args + 8), load_i64(args + 16), count)
        tiles_off()

    for function in (Library().function(kernel(sums, f"test_tile_sums_{count}")), sums):
        out, spare = np.zeros((count, 16, 16), np.int32), np.zeros(64, np.uint8)
        args = np.array([left.ctypes.data, stored.ctypes.data, out.ctypes.data])
        function(args.ctypes.data, 0, 1, spare.ctypes.data)
        assert (out == expected).all()
