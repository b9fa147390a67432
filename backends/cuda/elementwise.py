"""Norms, rotary embedding, cache writes, activations and routing: one thread per value or warp per row.

All arrays are 1-D; shapes come as numbers, factors as float32 (a Python float would make the arithmetic double).
Meanings: `edgellm.backends.base`, twins: `edgellm.backends.reference`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda, types

from edgellm.backends.cuda.device import warp_sum

__all__ = [
    "ACTIVATIONS",
    "add",
    "add_bias",
    "columns",
    "combine",
    "concat",
    "layer_norm",
    "make_activate",
    "rms_norm",
    "rope",
    "route",
    "scale",
    "store_q8",
    "store_rows",
    "take",
]

f32, i32 = types.float32, types.int32
Kernel = Callable[..., Any]


@cuda.jit
def rms_norm(x, weight, y, n_rows, d, weight_rows, eps):
    """A warp per row; `weight_rows` 0: none, 1: one row for all, h: row r uses weight row r % h."""
    lane = cuda.threadIdx.x & 31
    row = cuda.blockIdx.x * (cuda.blockDim.x >> 5) + (cuda.threadIdx.x >> 5)
    total = f32(0.0)
    if row < n_rows:
        for i in range(lane, d, 32):
            total += x[row * d + i] * x[row * d + i]
    total = warp_sum(total)
    if row < n_rows:
        r = f32(1.0) / math.sqrt(total / f32(d) + eps)
        for i in range(lane, d, 32):
            value = x[row * d + i] * r
            y[row * d + i] = value * weight[row % weight_rows * d + i] if weight_rows > 0 else value


@cuda.jit
def layer_norm(x, weight, bias, y, n_rows, d, weight_rows, bias_rows, eps):
    """A warp per row; rows of weight and bias as in rms_norm."""
    lane = cuda.threadIdx.x & 31
    row = cuda.blockIdx.x * (cuda.blockDim.x >> 5) + (cuda.threadIdx.x >> 5)
    total = f32(0.0)
    if row < n_rows:
        for i in range(lane, d, 32):
            total += x[row * d + i]
    mean = warp_sum(total) / f32(d)
    total = f32(0.0)
    if row < n_rows:
        for i in range(lane, d, 32):
            total += (x[row * d + i] - mean) * (x[row * d + i] - mean)
    total = warp_sum(total)
    if row < n_rows:
        r = f32(1.0) / math.sqrt(total / f32(d) + eps)
        for i in range(lane, d, 32):
            value = (x[row * d + i] - mean) * r
            if weight_rows > 0:
                value = value * weight[row % weight_rows * d + i]
            if bias_rows > 0:
                value = value + bias[row % bias_rows * d + i]
            y[row * d + i] = value


@cuda.jit
def rope(x, positions, variants, inv_freq, magnitude, y, heads, d, n_dims, adjacent, total):
    """One thread per value of (n_tokens, heads, d)."""
    i = cuda.grid(1)
    if i >= total:
        return
    e, token = i % d, i // (d * heads)
    if e >= n_dims:
        y[i] = x[i]
        return
    half = n_dims // 2
    j = e // 2 if adjacent else e % half
    is_first = e % 2 == 0 if adjacent else e < half
    other = i + 1 if adjacent else i + half
    if not is_first:
        other = i - 1 if adjacent else i - half
    variant = variants[token]
    angle = f32(positions[token]) * inv_freq[variant * half + j]
    c, s = math.cos(angle) * magnitude[variant], math.sin(angle) * magnitude[variant]
    y[i] = f32(x[i] * c - x[other] * s) if is_first else f32(x[other] * s + x[i] * c)


@cuda.jit
def store_rows(k, v, k_cache, v_cache, table, width, positions, seqs, block_size, k_row, v_row, total):
    """Rows of k (n_tokens, k_row) and v into their sequences' blocks, in the cache's float type. One thread per value:
    the first n_tokens * k_row are k's."""
    i = cuda.grid(1)
    if i >= total:
        return
    n_k = total // (k_row + v_row) * k_row
    is_k = i < n_k
    row_size = k_row if is_k else v_row
    at = i if is_k else i - n_k
    token = at // row_size
    p = positions[token]
    slot = table[seqs[token] * width + p // block_size] * block_size + p % block_size
    if is_k:
        k_cache[slot * row_size + at % row_size] = k[at]
    else:
        v_cache[slot * row_size + at % row_size] = v[at]


@cuda.jit
def store_q8(x, cache, scales, table, width, positions, seqs, block_size, row_size, n_groups):
    """As store_rows for K or V as int8 with one scale per 32: one thread per group."""
    g = cuda.grid(1)
    if g >= n_groups:
        return
    per_row = row_size // 32
    token = g // per_row
    p = positions[token]
    slot = table[seqs[token] * width + p // block_size] * block_size + p % block_size
    at = slot * per_row + g % per_row
    top = f32(0.0)
    for i in range(32):
        top = max(top, abs(x[32 * g + i]))
    d = top / f32(127.0)
    scales[at] = d
    for i in range(32):
        value = x[32 * g + i] / d if d > f32(0.0) else f32(0.0)
        q = i32(value + f32(0.5)) if value >= f32(0.0) else i32(value - f32(0.5))
        cache[32 * at + i] = min(max(q, i32(-127)), i32(127))


@cuda.jit(device=True)
def _sigmoid(x):
    return f32(1.0) / (f32(1.0) + math.exp(-x))


@cuda.jit(device=True)
def _silu(x):
    return x * _sigmoid(x)


@cuda.jit(device=True)
def _gelu(x):
    return f32(0.5) * x * (f32(1.0) + math.erf(x * f32(0.7071067811865476)))


@cuda.jit(device=True)
def _gelu_tanh(x):
    return f32(0.5) * x * (f32(1.0) + math.tanh(f32(0.7978845608028654) * (x + f32(0.044715) * x * x * x)))


@cuda.jit(device=True)
def _relu(x):
    return max(x, f32(0.0))


@cuda.jit(device=True)
def _relu2(x):
    positive = max(x, f32(0.0))
    return positive * positive


@cuda.jit(device=True)
def _tanh(x):
    return math.tanh(x)


@cuda.jit(device=True)
def _exp_rest(x):
    below = min(x, f32(0.0))
    return math.expm1(below) - below


@cuda.jit(device=True)
def _swiglu_oai(x):
    x = min(x, f32(7.0))
    return x * _sigmoid(f32(1.702) * x)


ACTIVATIONS = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "relu2": _relu2,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "exp_rest": _exp_rest,
    "swiglu_oai": _swiglu_oai,
}


def make_activate(kind: str, has_up: bool) -> Kernel:
    """y = f(gate) * up, or f(gate)."""
    function, clipped = ACTIVATIONS[kind], kind == "swiglu_oai"

    @cuda.jit
    def activate(gate, up, y, total):
        i = cuda.grid(1)
        if i < total:
            value = function(gate[i])
            if has_up:
                value *= min(max(up[i], f32(-7.0)), f32(7.0)) + f32(1.0) if clipped else up[i]
            y[i] = value

    return activate


@cuda.jit
def add(a, b, factor, y, total):
    """y = a + factor * b."""
    i = cuda.grid(1)
    if i < total:
        y[i] = a[i] + factor * b[i]


@cuda.jit
def add_bias(x, bias, ids, n, total):
    """x += bias in place; row r takes bias row ids[r] (experts), or row 0 when ids is empty."""
    i = cuda.grid(1)
    if i < total:
        row = ids[i // n] if ids.size > 0 else 0
        x[i] += bias[row * n + i % n]


@cuda.jit
def scale(x, factor, softcap, y, total):
    """y = x * factor, then softcap * tanh(y / softcap)."""
    i = cuda.grid(1)
    if i < total:
        value = x[i] * factor
        y[i] = softcap * math.tanh(value / softcap) if softcap > f32(0.0) else value


@cuda.jit
def take(x, rows, y, d, total):
    """Rows of x by index."""
    i = cuda.grid(1)
    if i < total:
        y[i] = x[rows[i // d] * d + i % d]


@cuda.jit
def columns(x, y, d, start, width, total):
    """Columns from `start` on of rows of d."""
    i = cuda.grid(1)
    if i < total:
        y[i] = x[i // width * d + start + i % width]


@cuda.jit
def concat(a, b, y, n_a, n_b, total):
    """Rows of n_a and n_b side by side."""
    i = cuda.grid(1)
    if i < total:
        row, column = i // (n_a + n_b), i % (n_a + n_b)
        y[i] = a[row * n_a + column] if column < n_a else b[row * n_b + column - n_a]


@cuda.jit
def combine(x, weights, y, n_used, m, total):
    """y[t, c] = sum over j of weights[t, j] * x[t, j, c], in rising j."""
    i = cuda.grid(1)
    if i < total:
        t, value = i // m, f32(0.0)
        for j in range(n_used):
            value += weights[t * n_used + j] * x[(t * n_used + j) * m + i % m]
        y[i] = value


MAX_GROUPS = 32
DROPPED = 3.4e38


@cuda.jit(device=True)
def _drop_groups(scores, base, bias, n_experts, groups, used, worth, single):
    """Worth of each group of experts, its highest score (`single`) or two; DROPPED for all but the `used` best."""
    size = n_experts // groups
    for g in range(groups):
        first, second = f32(-DROPPED), f32(-DROPPED)
        for e in range(g * size, (g + 1) * size):
            score = scores[base + e] + (bias[e] if bias.size > 0 else f32(0.0))
            if score > first:
                second = first
                first = score
            elif score > second:
                second = score
        worth[g] = first if single else first + second
    for _ in range(groups - used):
        worst = 0
        for g in range(1, groups):
            if worth[g] <= worth[worst]:
                worst = g
        worth[worst] = f32(DROPPED)


@cuda.jit
def route(scores, bias, ids, weights, n_rows, n_experts, n_used, mode, normalise, factor, groups, groups_used):
    """One thread per row. `mode` 0 softmax over all, 1 softmax over the chosen, 2 sigmoid. Ties: lowest index."""
    t = cuda.grid(1)
    if t >= n_rows:
        return
    worth = cuda.local.array(MAX_GROUPS, f32)
    base = t * n_experts
    top = scores[base]
    for e in range(n_experts):
        top = max(top, scores[base + e])
    total = f32(0.0)
    for e in range(n_experts):
        value = scores[base + e]
        if mode == 0:
            scores[base + e] = math.exp(value - top)
            total += scores[base + e]
        elif mode == 2:
            scores[base + e] = _sigmoid(value)
    for e in range(n_experts):
        if mode == 0:
            scores[base + e] /= total
    if groups > 1:
        _drop_groups(scores, base, bias, n_experts, groups, groups_used, worth, mode == 0)
    chosen_sum = f32(0.0)
    for j in range(n_used):
        best = -1
        for e in range(n_experts):
            taken = groups > 1 and worth[e // (n_experts // groups)] == f32(DROPPED)
            for i in range(j):
                taken = taken or ids[t * n_used + i] == e
            if not taken:
                extra = bias[e] if bias.size > 0 else f32(0.0)
                kept = (bias[best] if bias.size > 0 else f32(0.0)) if best >= 0 else f32(0.0)
                if best < 0 or scores[base + e] + extra > scores[base + best] + kept:
                    best = e
        ids[t * n_used + j] = best
        value = math.exp(scores[base + best] - top) if mode == 1 else scores[base + best]
        weights[t * n_used + j] = value
        chosen_sum += value
    for j in range(n_used):
        value = weights[t * n_used + j]
        weights[t * n_used + j] = (value / chosen_sum if normalise or mode == 1 else value) * factor
