"""Formats and measured choices of the Metal backend, without a Metal device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")

from edgellm.backends.metal.affine import AFFINE_TYPES, affine_product, to_affine  # noqa: E402
from edgellm.backends.metal.choice import Choices  # noqa: E402
from edgellm.backends.metal.kernels import MatmulKernels  # noqa: E402
from edgellm.backends.metal.products import Products  # noqa: E402
from edgellm.backends.metal.weights import MetalWeight  # noqa: E402
from edgellm.quants import GGMLType  # noqa: E402
from tests.metal.blocks import dequantized, nmse, random_weights  # noqa: E402

WAYS = ("kernel", "affine")


@pytest.mark.parametrize("kind", AFFINE_TYPES, ids=lambda t: t.name)
def test_affine_format_holds_the_same_weights(kind: GGMLType) -> None:
    rng = np.random.default_rng(3)
    raw = random_weights(kind, 5, 512, rng)
    x = rng.standard_normal((3, 512)).astype(np.float32)
    weight = MetalWeight("w", kind, (5, 512), mx.array(raw))
    before = weight.nbytes
    y = affine_product(mx.array(x), to_affine(mx.array(raw), kind))
    assert nmse(np.array(y), x @ dequantized(raw, kind).T) < 1e-10
    weight.repack(to_affine(mx.array(raw), kind))
    assert before < weight.nbytes < 2 * before


def test_repacking_stops_where_memory_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Affine weights are larger than the plan says, so only so many are made; rows that are looked up never are."""
    choices = Choices("Apple M1", tmp_path)
    monkeypatch.setattr(choices, "winner", lambda key, ways, measure: "affine")
    raw = mx.array(random_weights(GGMLType.Q4_K, 4, 256, np.random.default_rng(0)))
    extra = 4 * 256 * 6 // 8 - raw.nbytes
    products = Products(MatmulKernels(mx.fast.metal_kernel), choices, spare=2 * extra + 1)
    weights = [MetalWeight(name, GGMLType.Q4_K, (4, 256), raw) for name in ("token_embd", "a", "b", "c")]
    for weight in weights:
        products.choose_format(weight)
    assert [weight.affine is not None for weight in weights] == [False, True, True, False]
    assert weights[1].nbytes == raw.nbytes + extra
    (y,) = products.linears(mx.ones((9, 256)), [weights[1]])
    assert nmse(np.array(y), np.ones((9, 256)) @ dequantized(np.array(raw), GGMLType.Q4_K).T) < 1e-10


def test_the_faster_way_wins_and_is_remembered(tmp_path: Path) -> None:
    asked: list[str] = []

    def measure(way: str) -> float:
        asked.append(way)
        return {"kernel": 2e-4, "affine": 1e-4}[way]

    assert Choices("Apple M1 Pro", tmp_path).winner("Q4_K 8x256", WAYS, measure) == "affine"
    again = Choices("Apple M1 Pro", tmp_path)
    del asked[:]
    assert again.winner("Q4_K 8x256", WAYS, measure) == "affine"
    assert not asked, "a known shape is not timed again"
    assert again.path.name == "apple-m1-pro.json"
    assert again.winner("Q4_K 16x256", WAYS, lambda way: 1e-4) == "kernel", "a tie keeps the file's own bytes"


def test_a_way_that_fails_loses_and_a_damaged_file_is_measured_anew(tmp_path: Path) -> None:
    def measure(way: str) -> float:
        if way == "affine":
            raise RuntimeError("no such kernel")
        return 1e-4

    assert Choices("../../etc/x", tmp_path).path.parent == tmp_path, "a chip's name is no path"
    (tmp_path / "apple-m3.json").write_text("{ torn")
    assert Choices("Apple M3", tmp_path).winner("Q8_0 8x256", WAYS, measure) == "kernel"
