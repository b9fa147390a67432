"""The reference ops against arithmetic done by hand or by other means."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from edgellm.backends.base import AttentionSpec, KVSpec, QTensor, RopeSpec, RouteSpec
from edgellm.backends.reference import ReferenceBackend
from edgellm.backends.reference_kv import ReferenceKV, quantise_q8_0
from edgellm.quants import GGMLType
from tests.support.models import make_batch

B = ReferenceBackend()


def floats(*values: object) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def weight(values: npt.NDArray[np.float32], backend: ReferenceBackend = B):  # type: ignore[no-untyped-def]
    values = np.ascontiguousarray(values, np.float32)
    data = values.view(np.uint8).reshape(*values.shape[:-1], values.shape[-1] * 4)
    return backend.load(QTensor("w", GGMLType.F32, values.shape, data))


def table(*blocks: int) -> list[npt.NDArray[np.int32]]:
    return [np.array([blocks], np.int32)]


def test_linear_and_embed() -> None:
    w = weight(floats([1, 2, 3], [4, 5, 6]))
    assert B.linear(floats([1, 0, -1], [2, 1, 0]), w).tolist() == [[-2, -2], [4, 13]]
    assert B.linear(floats([1, 0, -1]), w, weight(floats(10, 20))).tolist() == [[8, 18]]
    assert B.embed(w, np.array([1, 1, 0], np.int32)).tolist() == [[4, 5, 6], [4, 5, 6], [1, 2, 3]]


def test_weights_past_the_cache_limit_give_the_same_products() -> None:
    rng = np.random.default_rng(3)
    values, x = rng.standard_normal((50, 64)).astype(np.float32), rng.standard_normal((3, 64)).astype(np.float32)
    poor = ReferenceBackend(cache_bytes=0)
    assert np.array_equal(poor.linear(x, weight(values, poor)), B.linear(x, weight(values)))
    assert poor.cache_left == 0


def test_norms() -> None:
    x = floats([3, 4])
    assert np.allclose(B.rms_norm(x, None, 0.0), floats([3, 4]) / math.sqrt(12.5))
    assert np.allclose(B.rms_norm(x, weight(floats(2, -1)), 0.5), floats([6, -4]) / math.sqrt(13))
    assert np.allclose(B.layer_norm(x, None, None, 0.0), [[-1, 1]])
    found = B.layer_norm(x, weight(floats(2, 3)), weight(floats(10, 20)), 0.75)
    assert np.allclose(found, [[10 - 1 / 1, 20 + 1.5]])  # std is sqrt(0.25 + 0.75) = 1
    heads = B.rms_norm(np.ones((1, 2, 4), np.float32), weight(floats([1] * 4, [2] * 4)), 0.0)
    assert heads[0].tolist() == [[1] * 4, [2] * 4]


@pytest.mark.parametrize("adjacent", [True, False])
def test_rope_is_a_rotation_by_position_times_frequency(adjacent: bool) -> None:
    spec = RopeSpec(4, adjacent, floats([1.0, 0.5], [0.25, 2.0]), floats(1.0, 2.0))
    x = floats([1, 2, 3, 4, 5, 6])[:, None].repeat(2, 0).reshape(2, 1, 6)
    batch = make_batch([[0], [0]], [0, 3], table(1, 1), variants=[0, 1])
    found = B.rope(x, batch, spec)
    assert np.array_equal(found[0], x[0])  # position 0
    pairs = [(0, 1), (2, 3)] if adjacent else [(0, 2), (1, 3)]
    for (i, j), frequency in zip(pairs, (0.25, 2.0), strict=True):
        turned = complex(x[1, 0, i], x[1, 0, j]) * np.exp(3j * frequency) * 2
        assert np.allclose([found[1, 0, i], found[1, 0, j]], [turned.real, turned.imag], atol=1e-5)
    assert found[1, 0, 4:].tolist() == [5, 6]


def attend_by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, spec: AttentionSpec) -> np.ndarray:
    """One query head over rows of one key/value head, in float64."""
    first = max(0, position - spec.window + 1) if spec.window else 0
    last = position if spec.causal else min(len(k), position + (spec.window or len(k))) - 1
    scores = k[first : last + 1].astype(np.float64) @ q * spec.scale
    if spec.softcap:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    weights = np.exp(scores)
    total = weights.sum() + (math.exp(spec.sinks.values()[0]) if spec.sinks else 0)
    return (weights / total) @ v[first : last + 1]


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(0.5),
        AttentionSpec(0.5, window=3),
        AttentionSpec(0.5, softcap=1.5),
        AttentionSpec(0.5, window=3, sinks=weight(floats(0.7, 0.7, 0.7, 0.7))),
        AttentionSpec(0.5, causal=False),
        AttentionSpec(0.5, causal=False, window=3),
    ],
    ids=["full", "window", "softcap", "sinks", "encoder", "encoder with a window"],
)
def test_attention(spec: AttentionSpec) -> None:
    rng = np.random.default_rng(5)
    q, k = (rng.standard_normal((9, h, 8)).astype(np.float32) for h in (4, 2))
    v = rng.standard_normal((9, 2, 6)).astype(np.float32)
    kv = B.new_kv(KVSpec(2, 8, 6, "f32", 4, 0), 6)
    batch = make_batch([[0] * 9], [0], table(5, 2, 3))
    B.store_kv(kv, k, v, batch)
    found = B.attention(q, kv, batch, spec)
    for position in range(9):
        for head in range(4):
            hand = attend_by_hand(q[position, head], k[:, head // 2], v[:, head // 2], position, spec)
            assert np.allclose(found[position, head], hand, atol=1e-5)


def test_blocks_behind_the_window_are_never_read() -> None:
    kv = B.new_kv(KVSpec(1, 2, 2, "f32", 2, 0), 4)
    kv.k[0] = kv.v[0] = np.nan
    ones = np.ones((1, 1, 2), np.float32)
    for position in (4, 5):
        batch = make_batch([[0]], [position], table(0, 0, 3))
        B.store_kv(kv, ones, ones, batch)
        assert np.isfinite(B.attention(ones, kv, batch, AttentionSpec(1.0, window=position - 3))).all()


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
def test_blocks_can_be_copied_saved_and_restored(kv_type: str) -> None:
    kv = ReferenceKV(KVSpec(2, 40, 32, kv_type, 4, 0), 5)
    rng = np.random.default_rng(6)
    k, v = rng.standard_normal((4, 2, 40)).astype(np.float32), rng.standard_normal((4, 2, 32)).astype(np.float32)
    at, there = np.array([1], np.int32), np.array([3], np.int32)
    kv.write(at, np.arange(4, dtype=np.int32), k, v)
    bound = {"f32": 0, "f16": 2e-3, "q8_0": 2e-2}[kv_type]
    stored = kv.read(at, 0, 4)
    assert np.abs(stored[0] - k).max() <= bound and np.abs(stored[1] - v).max() <= bound
    kv.copy_block(1, 3)
    kv.write_block(4, kv.read_block(1))
    for other in (there, np.array([4], np.int32)):
        assert np.array_equal(kv.read(other, 0, 4)[0], stored[0]) and np.array_equal(kv.read(other, 0, 4)[1], stored[1])


def test_q8_0_rows_are_those_of_the_gguf_package() -> None:
    import gguf

    x = np.random.default_rng(7).standard_normal((5, 64)).astype(np.float32)
    x[2] = 0
    assert np.array_equal(quantise_q8_0(x), gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0))


def test_activations() -> None:
    x, up = floats([-1, 0, 2]), floats([3, 3, 3])
    assert np.allclose(B.activate("silu", x, up), 3 * x / (1 + np.exp(-x)))
    erf = np.array([math.erf(v / math.sqrt(2)) for v in (-1, 0, 2)])
    assert np.allclose(B.activate("gelu", x), 0.5 * x * (1 + erf))
    assert np.allclose(B.activate("gelu_tanh", x), [[-0.15880801, 0, 1.9545977]], atol=1e-6)
    assert B.activate("relu", x).tolist() == [[0, 0, 2]]
    rest = B.activate("exp_rest", floats([-2, 0, 3]))
    assert np.allclose(rest, [[math.exp(-2) + 1, 0, 0]])
    assert B.activate("relu2", x).tolist() == [[0, 0, 4]]
    assert B.activate("sigmoid", floats([0]), floats([3])).tolist() == [[1.5]]
    assert np.allclose(B.activate("tanh", x), np.tanh(x))
    clamped = B.activate("swiglu_oai", floats([9, 1]), floats([-9, 2]))
    assert np.allclose(clamped, [[7 / (1 + math.exp(-1.702 * 7)) * -6, 1 / (1 + math.exp(-1.702)) * 3]])


def test_add_scale_take() -> None:
    x = floats([1, 2], [3, 4])
    assert B.add(x, x, 0.5).tolist() == [[1.5, 3], [4.5, 6]]
    assert B.scale(x, 2.0).tolist() == [[2, 4], [6, 8]]
    assert np.allclose(B.scale(x, 2.0, softcap=3.0), 3 * np.tanh(2 * x / 3))
    assert B.take(x, np.array([1], np.int32)).tolist() == [[3, 4]]


def test_route() -> None:
    scores = floats([1, 3, 3, 0])
    p = np.exp([1, 3, 3, 0]) / np.exp([1, 3, 3, 0]).sum()
    ids, weights = B.route(scores, RouteSpec(2, normalise=False))
    assert ids.tolist() == [[1, 2]] and np.allclose(weights, [p[1:3]])  # ties: lowest index first
    assert np.allclose(B.route(scores, RouteSpec(2))[1], [[0.5, 0.5]])
    assert np.allclose(B.route(scores, RouteSpec(3, "softmax_topk", False))[1][0].sum(), 1)
    ids, weights = B.route(scores, RouteSpec(1, "sigmoid", False, scale=2.0))
    assert ids.tolist() == [[1]] and np.allclose(weights, 2 / (1 + math.exp(-3)))
    ids, weights = B.route(scores, RouteSpec(1, normalise=False), weight(floats(0, 0, 0, 9)))
    assert ids.tolist() == [[3]] and np.allclose(weights, p[3])  # the bias chooses, the score weighs


def test_route_among_the_best_groups() -> None:
    """Pairs (9, 0), (5, 5), (8, 3), (1, 1). By the sum of two (DeepSeek 3) the second and third are worth most, so
    9 is not chosen; by the highest alone (DeepSeek 2, softmax) the first and third are."""
    values = floats([9, 0.1, 5, 5, 8, 3, 1, 1])
    ids, weights = B.route(np.log(values / (10 - values)), RouteSpec(3, "sigmoid", n_groups=4, n_groups_used=2))
    assert ids.tolist() == [[4, 2, 3]] and np.allclose(weights, [[8 / 18, 5 / 18, 5 / 18]])
    ids, weights = B.route(np.log(values), RouteSpec(3, "softmax", n_groups=4, n_groups_used=2))
    assert ids.tolist() == [[0, 4, 5]] and np.allclose(weights, [[9 / 20, 8 / 20, 3 / 20]])


def test_experts() -> None:
    w = np.arange(24).reshape(3, 4, 2).astype(np.float32)
    bias = floats([1] * 4, [2] * 4, [3] * 4)
    x, ids = floats([1, 0], [0, 1]), np.array([[2, 0], [1, 2]], np.int32)
    found = B.expert_linear(x, weight(w), ids, weight(bias))
    assert found[0, 0].tolist() == (w[2, :, 0] + 3).tolist() and found[1, 0].tolist() == (w[1, :, 1] + 2).tolist()
    per_slot = B.expert_linear(np.stack([x, 2 * x], axis=1), weight(w), ids)
    assert per_slot[1, 1].tolist() == (2 * w[2, :, 1]).tolist()
    assert B.combine(per_slot, floats([0.5, 2], [1, 0]))[0].tolist() == (0.5 * w[2, :, 0] + 4 * w[0, :, 0]).tolist()


def test_heads_with_their_own_matrices_and_columns() -> None:
    w = np.arange(12).reshape(2, 3, 2).astype(np.float32)
    x = np.stack([floats([1, 0], [0, 1]), floats([0, 2], [1, 1])])
    found = B.head_linear(x, weight(w))
    assert found.tolist() == [[[0, 2, 4], [7, 9, 11]], [[2, 6, 10], [13, 17, 21]]]
    assert B.columns(found, 1, 3).tolist() == [[[2, 4], [9, 11]], [[6, 10], [17, 21]]]
    assert B.concat(x, B.columns(found, 2, 3))[1].tolist() == [[0, 2, 10], [1, 1, 21]]
