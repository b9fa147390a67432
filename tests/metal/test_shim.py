"""The shim itself: SIMD functions, rounding and barriers against numpy and IEEE rules; planted bugs must be found."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")
from tests.metal.can_run import cannot_run  # noqa: E402

if reason := cannot_run():
    pytest.skip(reason, allow_module_level=True)

from edgellm.backends.metal.kernels import MatmulKernels  # noqa: E402
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
    "reads past the end of w": ("min(uint(r), rows - 1)", "uint(r)", "out-of-bounds"),
    "writes past the end of y": ("if (lane == 0 && row0 + uint(r) < n)", "if (lane == 0)", "out-of-bounds"),
    "sum without the odd lanes": (
        "const float total = factor * simd_sum(acc[r * M + m]);",
        "float total = 0.0f;\n    if (lane % 2 == 0) total = factor * simd_sum(acc[r * M + m]);",
        "values",
    ),
    "sums never zeroed": ("acc[i] = 0.0f;", "(void)acc[i];", "values"),
    "two simdgroups write one output": ("out[m * n + row0 + uint(r)] = total;", "out[m * n] = total;", "race"),
    "double in the kernel": ("float acc[ROWS * M]", "double acc[ROWS * M]", "error"),
    "next block": ("block) * BYTES", "block + 1) * BYTES", "out-of-bounds"),
    "16 parts too many": ("p < uint(K) / 32", "p < uint(K) / 32 + 16", "out-of-bounds"),
    "norm of another row": ("simd_sum(squares[m])", "simd_sum(squares[0])", "values"),
    "q's rows for k": ("which == 1 ? unit - S0", "which == 1 ? unit", "out-of-bounds"),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(name: str) -> None:
    old, new, expected = BUGS[name]
    rng = np.random.default_rng(1)
    raw = [mx.array(random_weights(GGMLType.Q4_K, n, 2048, rng)) for n in (5, 3)]
    x = mx.array(rng.standard_normal((2, 2048)).astype(np.float32))
    made: list[CpuKernel] = []

    def run(old: str, new: str) -> np.ndarray:
        def make(source: str, header: str, **arguments) -> CpuKernel:
            assert old == new or (source + header).count(old) == 1
            return maker(made, mode="trace")(
                source=source.replace(old, new), header=header.replace(old, new), **arguments
            )

        parts = MatmulKernels(make).matvecs(raw, GGMLType.Q4_K, x, mx.ones((2048,)), 1e-5)
        return np.concatenate([np.array(part).ravel() for part in parts])

    right = run("", "")
    assert not made[-1].findings
    try:
        wrong = run(old, new)
    except BuildError as error:
        assert expected == "error", error
        return
    seen = {f.split(":")[0] for f in made[-1].findings}
    if not np.array_equal(right, wrong):
        seen.add("values")
    assert expected in seen, (seen, made[-1].findings[:3])
