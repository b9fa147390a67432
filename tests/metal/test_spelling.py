"""What the Metal compiler refuses, the shim must refuse too, or a kernel could pass here and fail on a Mac; and what it
takes must build. Which is which follows the Metal Shading Language specification (4: address spaces, 2: types and
conversions, 1.4: C++ that is left out, 5 and 6: functions)."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")
from tests.metal.can_run import cannot_run  # noqa: E402

if reason := cannot_run():
    pytest.skip(reason, allow_module_level=True)

from tests.metal.harness import BuildError, check_spaces, maker  # noqa: E402

# Spelling -> (header, body). `a` is a device buffer of 64 floats, `b` a constant one of 4, `o` the output.
REFUSED = {
    "double": ("", "double d = a[0]; o[0] = d;"),
    "long long": ("", "long long n = 3; o[0] = float(n);"),
    "C library": ("", "o[0] = sqrtf(a[0]);"),
    "std": ("", "o[0] = std::min(a[0], a[1]);"),
    "new": ("", "thread float* p = new float[2]; o[0] = p[0];"),
    "throw": ("", "throw 1;"),
    "virtual": ("struct S { virtual float f() { return 1.0f; } };", "o[0] = 1.0f;"),
    "min of two types": ("", "o[0] = float(min(1u, 2));"),
    "exp of an int": ("", "o[0] = exp(2);"),
    "half4 times float4": ("", "o[0] = (half4(1.0h) * float4(2.0f)).x;"),
    "float4 for half4": ("", "half4 h = float4(1.0f); o[0] = float(h.x);"),
    "float2 for int2": ("", "int2 n = float2(1.5f); o[0] = float(n.x);"),
    "as_type of another size": ("", "o[0] = as_type<float>(ushort(1));"),
    "write to an input": ("", "a[0] = 1.0f;"),
    "attribute in a helper": ("float f() { return float(thread_index_in_simdgroup); }", "o[0] = f();"),
    "helper pointer without a space": ("float f(const float* p) { return p[0]; }", "o[0] = f(a);"),
    "helper reference without a space": ("void f(float& x) { x = 1.0f; }", "float y; f(y); o[0] = y;"),
    "local pointer without a space": ("", "float x[2]; float* p = x; o[0] = p[0];"),
    "cast without a space": ("", "o[0] = ((const float4*)a)[0].x;"),
    "threadgroup for device": (
        "float f(const device float* p) { return p[0]; }",
        "threadgroup float s[4]; s[0] = 1.0f; o[0] = f(s);",
    ),
    "constant for device": ("float f(const device float* p) { return p[0]; }", "o[0] = f(b);"),
    "device for thread": ("float f(const thread float* p) { return p[0]; }", "o[0] = f(a);"),
    "cast between spaces": ("", "threadgroup float s[4]; s[0] = 1.0f; o[0] = ((const device float*)s)[0];"),
    "threadgroup with a value": ("", "threadgroup float s[2] = {1.0f, 2.0f}; o[0] = s[0];"),
    "threadgroup in a branch": ("", "if (a[0] > 0.0f) { threadgroup float s[2]; s[0] = 1.0f; o[0] = s[0]; }"),
    "threadgroup in a helper": ("float f() { threadgroup float s[2]; s[0] = 1.0f; return s[0]; }", "o[0] = f();"),
    "table without constant": ("const float T[2] = {1.0f, 2.0f};", "o[0] = T[1];"),
    "lambda": ("", "auto f = [](float x) { return x; }; o[0] = f(a[0]);"),
    "recursion": ("float f(uint n) { return n == 0u ? 1.0f : f(n - 1u); }", "o[0] = f(3u);"),
    "goto": ("", "goto end; end: o[0] = 1.0f;"),
    "dynamic_cast": ("struct S {};", "thread S* s = nullptr; o[0] = dynamic_cast<thread S*>(s) ? 1.0f : 0.0f;"),
}
TAKEN = {
    "half literals": ("", "const half h = 1.5h; o[0] = float(h + 1e-1h);"),
    "bare literals are floats": ("", "o[0] = 0.5 * a[0];"),
    "scalar half and float": ("", "half h = a[0]; float f = h; o[0] = f;"),
    "constant table": ("constant constexpr float T[2] = {1.0f, 2.0f};", "o[0] = T[1];"),
    "vector load": ("", "const float4 v = *(const device float4*)(a + 4); o[0] = dot(v, v);"),
    "swizzle": ("", "float4 v = float4(1.0f); v.xy = float2(2.0f, 3.0f); const float2 u = v.zw; o[0] = u.x + v.y;"),
    "thread pointer": ("void f(thread float* p) { p[0] = 1.0f; }", "float x[2]; f(x); o[0] = x[0];"),
    "threadgroup array": ("", "threadgroup float s[4], t; s[0] = t = 1.0f; o[0] = s[0] + t;"),
    "template helper": ("template <int N> inline float f(const device float* p) { return p[N]; }", "o[0] = f<3>(a);"),
    "precise functions": ("", "o[0] = precise::tanh(a[0]) + fast::exp(a[1]) + precise::rsqrt(4.0f);"),
    "unrolled loop": ("", "float s = 0.0f;\n#pragma unroll\nfor (int i = 0; i < 4; i++) s += a[i];\no[0] = s;"),
}


def build(header: str, body: str) -> list[str]:
    kernel = maker()(name="t", input_names=["a", "b"], output_names=["o"], source=body, header=header + "\n")
    kernel(
        inputs=[mx.array(np.ones(64, np.float32)), mx.array(np.ones(4, np.float32))],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(4,)],
        output_dtypes=[mx.float32],
    )
    return check_spaces(kernel.code)


@pytest.mark.parametrize("name", REFUSED)
def test_what_metal_refuses_is_refused(name: str) -> None:
    try:
        found = build(*REFUSED[name])
    except BuildError:
        return
    assert found, "it built"


@pytest.mark.parametrize("name", TAKEN)
def test_what_metal_takes_builds(name: str) -> None:
    assert build(*TAKEN[name]) == []
