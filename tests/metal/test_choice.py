"""Formats, measured choices and limits of the Metal backend, without a Metal device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")

from edgellm.backends.metal.affine import AFFINE_TYPES, affine_product, to_affine  # noqa: E402
from edgellm.backends.metal.choice import Choices  # noqa: E402
from edgellm.backends.metal.limits import limits_of  # noqa: E402
from edgellm.backends.metal.weights import MetalWeight  # noqa: E402
from edgellm.quants import GGMLType  # noqa: E402
from tests.metal.blocks import dequantized, nmse, random_weights  # noqa: E402

GB = 1 << 30
# What mx.device_info() said on these machines (memory_size, max_recommended_working_set_size).
CHIPS = {
    "Apple M1": (16 * GB, 11_453_251_584),
    "Apple M2 Ultra": (192 * GB, 154_618_822_656),
    "Apple M4 Max": (64 * GB, 51_539_607_552),
}


@pytest.mark.parametrize("kind", AFFINE_TYPES, ids=lambda t: t.name)
def test_affine_format_holds_the_same_weights(kind: GGMLType) -> None:
    rng = np.random.default_rng(3)
    raw = random_weights(kind, 5, 512, rng)
    x = rng.standard_normal((3, 512)).astype(np.float32)
    weight = MetalWeight("w", kind, (5, 512), mx.array(raw), None)
    before = weight.nbytes
    y = affine_product(mx.array(x), to_affine(weight.data, kind))
    assert nmse(np.array(y), x @ dequantized(raw, kind).T) < 1e-10
    weight.repack()
    assert before < weight.nbytes < 2 * before


def test_the_faster_way_wins_and_is_remembered(tmp_path: Path) -> None:
    asked: list[str] = []

    def measure(way: str) -> float:
        asked.append(way)
        return {"kernel": 2e-4, "affine": 1e-4}[way]

    assert Choices("Apple M1 Pro", tmp_path).winner("Q4_K", 8, 256, measure) == "affine"
    again = Choices("Apple M1 Pro", tmp_path)
    del asked[:]
    assert again.winner("Q4_K", 8, 256, measure) == "affine"
    assert not asked, "a known shape is not timed again"
    assert again.path.name == "apple-m1-pro.json"
    assert again.winner("Q4_K", 16, 256, lambda way: 1e-4) == "kernel", "a tie keeps the file's own bytes"


def test_a_way_that_fails_loses_and_a_damaged_file_is_measured_anew(tmp_path: Path) -> None:
    def measure(way: str) -> float:
        if way == "affine":
            raise RuntimeError("no such kernel")
        return 1e-4

    assert Choices("../../etc/x", tmp_path).path.parent == tmp_path, "a chip's name is no path"
    (tmp_path / "apple-m3.json").write_text("{ torn")
    assert Choices("Apple M3", tmp_path).winner("Q8_0", 8, 256, measure) == "kernel"


@pytest.mark.parametrize("chip", CHIPS)
def test_limits_follow_the_device(chip: str) -> None:
    memory, working_set = CHIPS[chip]
    limits = limits_of({"memory_size": memory, "max_recommended_working_set_size": working_set, "device_name": chip})
    assert limits.wired == working_set
    assert limits.cache <= 2 * GB and limits.cache * 8 < memory
    assert limits_of({"memory_size": memory}).wired == memory * 3 // 4
    assert limits_of({}) == limits_of({"device_name": "llvmpipe"})
    assert limits_of({}).wired == 0
