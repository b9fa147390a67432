"""The shipped Metal text, run on this CPU: values against the gguf package, memory checks, reads counted."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")
from tests.metal.can_run import cannot_run  # noqa: E402

if reason := cannot_run():
    pytest.skip(reason, allow_module_level=True)

from edgellm.backends.metal import products  # noqa: E402
from edgellm.backends.metal.choice import Choices  # noqa: E402
from edgellm.backends.metal.kernels import KERNEL_TYPES, MatmulKernels, kernel_text  # noqa: E402
from edgellm.backends.metal.products import Products  # noqa: E402
from edgellm.backends.metal.weights import MetalWeight  # noqa: E402
from edgellm.quants import QUANT_TABLE, GGMLType  # noqa: E402
from tests.metal.blocks import dequantized, nmse, random_weights  # noqa: E402
from tests.metal.cases import LENGTHS, check_product  # noqa: E402
from tests.metal.harness import CpuKernel, check_spaces, maker  # noqa: E402

SEED = 7
TYPES = sorted(KERNEL_TYPES)
by_type = pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)


def clean(made: list[CpuKernel]) -> None:
    for kernel in made:
        assert not kernel.findings, kernel.findings
        assert not kernel.warnings, kernel.warnings
        assert not check_spaces(kernel.code)


def block_k(kind: GGMLType) -> int:
    return max(256, QUANT_TABLE[kind].block_size)


@by_type
def test_product_equals_the_dequantised_one(kind: GGMLType) -> None:
    """Few rows under trace, where each byte of the quants is read once; a prompt."""
    made: list[CpuKernel] = []
    check_product(kind, 1280, 4, 3, made, seed=SEED, mode="trace")
    reads = made[0].counts["w0"].reshape(-1, QUANT_TABLE[kind].type_size)
    assert reads.min() >= 1
    assert np.median(reads) == 1, "only scales, and what else neighbouring lanes share, are read again"
    check_product(kind, 256, 5, 33, made, seed=SEED)
    clean(made)


@pytest.mark.thorough
@by_type
def test_products_of_many_shapes_under_trace(kind: GGMLType) -> None:
    """1 to 8 rows and 33, each at a row length drawn from 256 to 14336."""
    rng = np.random.default_rng(SEED + int(kind))
    made: list[CpuKernel] = []
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 33):
        k = int(rng.choice(LENGTHS))
        check_product(kind, k, int(rng.integers(1, 6)), m, made, seed=SEED, mode="trace")
    clean(made)


@pytest.mark.parametrize("kind", [GGMLType.Q4_K, GGMLType.Q6_K], ids=lambda t: t.name)
def test_three_matrices_and_a_norm_in_one_launch(kind: GGMLType) -> None:
    rng = np.random.default_rng(SEED)
    made: list[CpuKernel] = []
    raw = [random_weights(kind, n, 512, rng) for n in (5, 2, 3)]
    x = rng.standard_normal((3, 512)).astype(np.float32)
    gain = rng.standard_normal(512).astype(np.float32)
    normed = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-3) * gain
    kernels = MatmulKernels(maker(made, mode="trace"))
    got = kernels.matvecs([mx.array(r) for r in raw], kind, mx.array(x), mx.array(gain), 1e-3)
    for y, r in zip(got, raw, strict=True):
        assert nmse(np.array(y), normed @ dequantized(r, kind).T) < 1e-10
    clean(made)
    assert len([k for k in made if k.code]) == 1


def test_activations_beyond_half_survive_a_prompt() -> None:
    rng = np.random.default_rng(SEED)
    raw, x = random_weights(GGMLType.Q4_K, 3, 256, rng), rng.standard_normal((9, 256)).astype(np.float32)
    x[4, 7] = 3e5
    weight = MetalWeight("w", GGMLType.Q4_K, (3, 256), mx.array(raw))
    (y,) = Products(MatmulKernels(maker()), None).linears(mx.array(x), [weight])
    assert nmse(np.array(y), x @ dequantized(raw, GGMLType.Q4_K).T) < 1e-6


@pytest.mark.thorough
def test_a_prompt_in_pieces_and_by_eights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights dequantised some rows at a time, and the several launches that a device may find faster."""
    rng = np.random.default_rng(SEED)
    raw, x = random_weights(GGMLType.Q4_K, 5, 256, rng), rng.standard_normal((17, 256)).astype(np.float32)
    weight = MetalWeight("w", GGMLType.Q4_K, (5, 256), mx.array(raw))
    expected = x @ dequantized(raw, GGMLType.Q4_K).T
    made: list[CpuKernel] = []
    monkeypatch.setattr(products, "HALF_BYTES", 2 * 2 * 256)
    (y,) = Products(MatmulKernels(maker(made)), None).linears(mx.array(x), [weight])
    assert len(made) == 1 and nmse(np.array(y), expected) < 1e-6
    choices = Choices("Apple M1", tmp_path)
    monkeypatch.setattr(choices, "winner", lambda key, ways, measure: ways[1])
    (y,) = Products(MatmulKernels(maker(made)), choices).linears(mx.array(x), [weight])
    assert nmse(np.array(y), expected) < 1e-10
    clean(made)


@pytest.mark.parametrize(
    "kind",
    [k if k.name in ("Q4_K", "MXFP4") else pytest.param(k, marks=pytest.mark.thorough) for k in TYPES],
    ids=lambda t: t.name,
)
def test_experts(kind: GGMLType) -> None:
    rng = np.random.default_rng(SEED)
    made: list[CpuKernel] = []
    kernels = MatmulKernels(maker(made))
    n, k, experts = 3, block_k(kind), 4
    raw = np.stack([random_weights(kind, n, k, rng) for _ in range(experts)])
    weights = np.stack([dequantized(r, kind) for r in raw])
    ids = np.array([[2, 0], [3, 3]])
    shared = rng.standard_normal((2, k)).astype(np.float32)
    own = rng.standard_normal((2, 2, k)).astype(np.float32)
    y = np.array(kernels.expert_matvec(mx.array(raw), kind, mx.array(shared), mx.array(ids)))
    assert nmse(y, np.einsum("tk,tjnk->tjn", shared, weights[ids])) < 1e-10
    y = np.array(kernels.expert_matvec(mx.array(raw), kind, mx.array(own), mx.array(ids)))
    assert nmse(y, np.einsum("tjk,tjnk->tjn", own, weights[ids])) < 1e-10
    clean(made)


@by_type
def test_head_comments_give_the_file_s_bytes(kind: GGMLType) -> None:
    """The budget on paper: bytes of a weight as the format has them."""
    info = QUANT_TABLE[kind]
    budget = re.search(r"// Budget: ([\d.]+) bytes", kernel_text(f"types_{kind.name.lower()}"))
    assert budget and float(budget[1]) == pytest.approx(info.type_size / info.block_size, rel=1e-5)
