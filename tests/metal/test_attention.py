"""Attention over the paged cache: plain MLX ops against the reference backend, and the Metal text against the ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")

from edgellm.backends.base import AttentionSpec, Backend, Batch, KVSpec, QTensor  # noqa: E402
from edgellm.backends.metal import attention_ops  # noqa: E402
from edgellm.backends.metal.backend import MetalBackend  # noqa: E402
from edgellm.backends.reference import ReferenceBackend  # noqa: E402
from edgellm.quants import GGMLType  # noqa: E402
from tests.metal.blocks import nmse  # noqa: E402
from tests.metal.can_run import cannot_run  # noqa: E402
from tests.metal.harness import CpuKernel, check_spaces, maker  # noqa: E402

SEED = 7
BLOCK = 32
NEEDS_SHIM = pytest.mark.skipif(bool(cannot_run()), reason=cannot_run())


def make_batch(spans: list[tuple[int, int]], rng: np.random.Generator) -> Batch:
    """Sequence s has rows at positions start .. stop - 1, in scrambled blocks."""
    positions = [np.arange(start, stop, dtype=np.int32) for start, stop in spans]
    n = sum(map(len, positions))
    width = -(-max(stop for _, stop in spans) // BLOCK)
    table = rng.permutation(width * len(spans)).astype(np.int32).reshape(len(spans), width) + 1
    return Batch(
        ids=np.zeros(n, np.int32),
        positions=np.concatenate(positions),
        seq_starts=np.cumsum([0, *map(len, positions)]).astype(np.int32),
        context_lens=np.array([stop for _, stop in spans], np.int32),
        block_tables=(table,),
        output_rows=np.arange(n, dtype=np.int32),
        rope_variants=np.zeros(n, np.int32),
    )


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 37},
    "soft cap": {"softcap": 20.0},
    "soft cap and window": {"softcap": 20.0, "window": 37},
    "sinks": {"sinks": True},
    "sinks and soft cap": {"sinks": True, "softcap": 20.0},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "window": 37},
}


def attend(
    backend: Backend, spans: list[tuple[int, int]], kv_spec: KVSpec, heads: int, sinks: bool = False, **settings: Any
) -> np.ndarray:
    """Random q, k and v: the cache of every sequence is filled from position 0, then the spans' rows attend."""
    rng = np.random.default_rng(SEED)
    batch = make_batch(spans, rng)
    whole = make_batch([(0, stop) for _, stop in spans], np.random.default_rng(SEED))
    if sinks:
        values = rng.standard_normal(heads).astype(np.float32)
        settings["sinks"] = backend.load(QTensor("sinks", GGMLType.F32, (heads,), values.view(np.uint8)))
    sizes = [(whole.n_tokens, kv_spec.n_kv_heads, dim) for dim in (kv_spec.k_dim, kv_spec.v_dim)]
    rows = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    q = rng.standard_normal((batch.n_tokens, heads, kv_spec.k_dim)).astype(np.float32)
    made = mx.array if isinstance(backend, MetalBackend) else np.asarray
    kv = backend.new_kv(kv_spec, int(batch.block_tables[0].max()) + 1)

    def store(batch: Batch) -> Any:
        backend.store_kv(kv, made(rows[0]), made(rows[1]), batch)
        return made(q)

    backend.execute(store, whole)
    return backend.execute(lambda b: backend.attention(made(q), kv, b, AttentionSpec(0.2, **settings)), batch)


@pytest.mark.parametrize("small", [False, True], ids=["in one piece", "cut by rows"])
@pytest.mark.parametrize("case", CASES)
def test_ops_equal_the_reference(case: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt chunk behind a prefix, a single row, a fresh prompt; K and V of different sizes, grouped heads."""
    if small:
        monkeypatch.setattr(attention_ops, "SCORES", 4 * 6 * 100 * 3)
    spans = [(0, 40), (0, 71), (0, 45)] if "causal" in CASES[case] else [(60, 100), (70, 71), (0, 45)]
    kv_spec = KVSpec(2, 48, 32, "f32", BLOCK, 0)
    found, expected = (attend(b, spans, kv_spec, 6, **CASES[case]) for b in (MetalBackend(), ReferenceBackend()))
    assert np.abs(found - expected).max() < 1e-5


@NEEDS_SHIM
@pytest.mark.parametrize("mode", [pytest.param("plain", marks=pytest.mark.thorough), "trace"])
@pytest.mark.parametrize("kv_type", [pytest.param("f32", marks=pytest.mark.thorough), "f16", "q8_0"])
@pytest.mark.parametrize(
    ("dim", "group", "settings"),
    [(64, 3, {}), (96, 2, {"window": 37, "softcap": 20.0}), (32, 2, {"sinks": True}), (160, 8, {"window": 400})],
)
def test_kernels_equal_the_ops(mode: str, kv_type: str, dim: int, group: int, settings: dict[str, Any]) -> None:
    """One row past a partition's end, three rows, and the first row of a sequence."""
    made: list[CpuKernel] = []
    spans, kv_spec = [(299, 300), (4, 7), (0, 1)], KVSpec(2, dim, dim, kv_type, BLOCK, 0)
    backends = MetalBackend(maker(made, mode=mode)), MetalBackend()
    found, expected = (attend(b, spans, kv_spec, 2 * group, **settings) for b in backends)
    assert nmse(found, expected) < 1e-10
    assert made[0].code, "the kernel was not taken"
    assert not [f for kernel in made for f in kernel.findings]
    for kernel in made:
        assert not kernel.code or not check_spaces(kernel.code)
