"""The shim itself: SIMD functions, rounding and barriers against numpy and IEEE rules; planted bugs must be found."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")
if shutil.which("g++") is None:
    pytest.skip("g++ is not installed: the Metal text cannot be run on this CPU", allow_module_level=True)

from edgellm.backends.metal.kernels import kernel_text  # noqa: E402
from edgellm.quants import GGMLType  # noqa: E402
from tests.metal.blocks import random_weights  # noqa: E402
from tests.metal.harness import BuildError, CpuKernel, maker  # noqa: E402

V = np.random.default_rng(0).integers(-50, 50, 64).astype(np.float32)
G = V.reshape(2, 32)
LANE = np.arange(32)
SIMD = {
    "simd_sum(v)": np.repeat(G.sum(1), 32),
    "simd_max(v)": np.repeat(G.max(1), 32),
    "simd_broadcast(v, 5)": np.repeat(G[:, 5], 32),
    "simd_shuffle(v, (lane * 7 + 3) % 32)": G[:, (LANE * 7 + 3) % 32].ravel(),
    "simd_shuffle_xor(v, 6)": G[:, LANE ^ 6].ravel(),
    "simd_shuffle_down(v, 4)": np.where(LANE + 4 < 32, G[:, (LANE + 4) % 32], G).ravel(),
    "simd_prefix_inclusive_sum(v)": np.cumsum(G, 1).ravel(),
}
VALUES = {
    "float(half(2048.0f + 0.0f * a[0]) + 1.0h - half(2048.0f))": 0.0,  # half rounds after each step
    "float(half(65504.0f) * 2.0h)": np.inf,
    "float(sizeof(1.0))": 4,
    "float(as_type<half2>(0x3c004000u).x)": 2.0,
    "dot(float4(1, 2, 3, 4), float4(half4(2.0h)))": 20.0,
    "float((uint4(1, 2, 3, 4) << 2u)[2])": 12.0,
    "float(sizeof(float3)) + float(sizeof(half3)) + float(sizeof(uchar4))": 28.0,
}


def launch(source, inputs, shape, grid, group, header="", template=(), **how):
    made: list[CpuKernel] = []
    names = [chr(ord("a") + i) for i in range(len(inputs))]
    kernel = maker(made, **how)(name="t", input_names=names, output_names=["o"], source=source, header=header)
    arguments = {"template": template, "grid": grid, "threadgroup": group, "output_shapes": [shape]}
    (y,) = kernel(inputs=[mx.array(i) for i in inputs], output_dtypes=[mx.float32], **arguments)
    return np.array(y), made[0]


@pytest.mark.parametrize("mode", ["plain", "trace"])
def test_simdgroup_functions(mode: str) -> None:
    body = "const uint lane = thread_index_in_simdgroup; const float v = a[thread_position_in_grid.x];\n"
    body += "".join(f"o[{i} * 64 + thread_position_in_grid.x] = {e};\n" for i, e in enumerate(SIMD))
    y, kernel = launch(body, [V], (len(SIMD), 64), (64, 1, 1), (64, 1, 1), mode=mode)
    for expression, got, want in zip(SIMD, y, SIMD.values(), strict=True):
        assert (got == want).all(), expression
    assert not kernel.findings


def test_rounding_and_sizes() -> None:
    body = "".join(f"o[{i}] = {e};\n" for i, e in enumerate(VALUES))
    y, _ = launch(body, [V], (len(VALUES),), (1, 1, 1), (1, 1, 1))
    for expression, got, want in zip(VALUES, y, VALUES.values(), strict=True):
        assert got == np.float32(want), expression


def test_cut_simdgroups_and_threadgroups() -> None:
    tree = """
    threadgroup float part[4];
    const float s = simd_sum(a[thread_position_in_grid.x]);
    if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = s;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index_in_threadgroup == 0) {
      float t = 0.0f;
      for (uint i = 0; i < simdgroups_per_threadgroup; i++) t += part[i];
      o[threadgroup_position_in_grid.x] = t;
    }
    """
    big = np.arange(250, dtype=np.float32)
    y, kernel = launch(tree, [big], (3,), (250, 1, 1), (100, 1, 1), mode="trace")
    assert y.tolist() == [big[:100].sum(), big[100:200].sum(), big[200:].sum()]
    assert not kernel.findings


@pytest.mark.parametrize("writer", [0, 63])
def test_a_missing_barrier_is_a_race(writer: int) -> None:
    text = """
    threadgroup float s[1];
    if (thread_index_in_threadgroup == WRITER) s[0] = a[0] + 1.0f;
    o[thread_position_in_grid.x] = s[0];
    """
    template = [("WRITER", writer)]
    _, kernel = launch(text, [V], (64,), (64, 1, 1), (64, 1, 1), template=template, mode="trace")
    assert any(f.startswith(("race", "uninitialised")) for f in kernel.findings)


# Mistakes in the shipped matvec text: (what to replace, replacement, finding or error expected).
BUGS = {
    "reads past the end of w": ("r < ROWS && row0 + r < uint(N); r++", "r < ROWS; r++", "out-of-bounds"),
    "writes past the end of y": ("if (lane == 0 && row0 + r < uint(N))", "if (lane == 0)", "out-of-bounds"),
    "sum without the odd lanes": (
        "const float total = simd_sum(acc[r][m]);",
        "float total = 0.0f;\n    if (lane % 2 == 0) total = simd_sum(acc[r][m]);",
        "values",
    ),
    "sums never zeroed": ("acc[r][m] = 0.0f;", "(void)acc[r][m];", "values"),
    "two simdgroups write one output": ("y[m * N + row0 + r] = total;", "y[m * N] = total;", "race"),
    "double in the kernel": ("float acc[ROWS][M];", "double acc[ROWS][M];", "error"),
    "next block": ("block) * BYTES", "block + 1) * BYTES", "out-of-bounds"),
    "16 parts too many": ("p < uint(K) / 32", "p < uint(K) / 32 + 16", "out-of-bounds"),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(name: str) -> None:
    old, new, expected = BUGS[name]
    source = kernel_text("matvec")
    assert source.count(old) == 1
    rng = np.random.default_rng(1)
    raw, x = random_weights(GGMLType.Q4_K, 5, 2048, rng), rng.standard_normal((2, 2048)).astype(np.float32)
    made: list[CpuKernel] = []

    def run(text: str) -> np.ndarray:
        header = kernel_text("types_q4_k")
        kernel = maker(made, mode="trace")(
            name="bug", input_names=["w", "x"], output_names=["y"], source=text, header=header
        )
        return np.array(
            kernel(
                inputs=[mx.array(raw.reshape(-1)), mx.array(x.reshape(-1))],
                template=[("K", 2048), ("N", 5), ("M", 2), ("ROWS", 2)],
                grid=(96, 1, 1),
                threadgroup=(64, 1, 1),
                output_shapes=[(2, 5)],
                output_dtypes=[mx.float32],
            )[0]
        )

    right = run(source)
    try:
        wrong = run(source.replace(old, new))
    except BuildError as error:
        assert expected == "error", error
        return
    seen = {f.split(":")[0] for f in made[-1].findings}
    if not np.array_equal(right, wrong):
        seen.add("values")
    assert expected in seen, (seen, made[-1].findings[:3])
