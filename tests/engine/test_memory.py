"""The memory arithmetic against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.config import EngineConfig
from edgellm.errors import MemoryBudgetError
from edgellm.memory import (
    block_bytes,
    check_budget,
    default_budget,
    kv_bytes,
    kv_bytes_per_token,
    make_plan,
    pool_sizes,
    window_blocks,
)
from edgellm.models.config import ModelConfig, RopeConfig
from edgellm.opening import ModelFile, size_up
from tests.support.tiny import tiny_gguf


def config(n_layers: int = 30, windows: tuple[int, ...] = (), context_length: int = 8192) -> ModelConfig:
    """SmolLM2-135M's shape: 3 KV heads of 64."""
    return ModelConfig(
        arch="llama",
        n_layers=n_layers,
        dim=576,
        n_heads=9,
        n_kv_heads=3,
        k_dim=64,
        v_dim=64,
        ffn_dim=1536,
        vocab_size=49152,
        context_length=context_length,
        norm_eps=1e-5,
        rope=RopeConfig(n_dims=64),
        windows=windows,
    )


def test_bytes_per_token() -> None:
    # 30 layers x 3 heads x (64 + 64) elements: 2 bytes, 4 bytes, or 34 bytes per 32.
    assert kv_bytes_per_token(config(), "f16") == 23040
    assert kv_bytes_per_token(config(), "f32") == 46080
    assert kv_bytes_per_token(config(), "q8_0") == 12240
    # design.md: "KV at 8192 is 189 MB".
    assert kv_bytes(config(), 8192, "f16") == 8192 * 23040 == 188743680


def test_windowed_layers_are_bounded_by_window_and_chunk() -> None:
    windowed = config(n_layers=6, windows=(512, 512, 512, 512, 512, 0))
    full, window = block_bytes(windowed, "f16")
    assert (full, window) == (768 * 32, 5 * 768 * 32)
    at_16k = kv_bytes(windowed, 16384, "f16")
    assert at_16k == 512 * full + window_blocks(windowed.cache_groups[1], 16384) * window
    # Twice the context costs twice the full layer and nothing more in the windowed ones.
    assert kv_bytes(windowed, 32768, "f16") - at_16k == 512 * full
    # Window 512 + chunk 512 is 32 blocks; two more for the unaligned ends.
    assert window_blocks(windowed.cache_groups[1], 16384) == 34
    assert window_blocks(windowed.cache_groups[1], 100) == 4


def test_plan_refuses_with_numbers_and_says_what_fits() -> None:
    plan = make_plan(config(), weights_bytes=90_000_000, budget=200_000_000, ctx=8192)
    assert plan.total_bytes == 90_000_000 + 188743680 + plan.scratch_bytes
    assert not plan.fits
    with pytest.raises(MemoryBudgetError, match=f"{plan.total_bytes}.*200000000.*--ctx {plan.max_ctx}"):
        check_budget(plan, "smollm2.gguf")
    fitting = make_plan(config(), weights_bytes=90_000_000, budget=200_000_000, ctx=plan.max_ctx)
    assert fitting.fits
    one_more = make_plan(config(), weights_bytes=90_000_000, budget=200_000_000, ctx=plan.max_ctx + 1)
    assert not one_more.fits


def test_plan_caps_the_context_by_the_budget() -> None:
    assert make_plan(config(), weights_bytes=0, budget=10**12).ctx == 8192
    capped = make_plan(config(), weights_bytes=0, budget=150_000_000)
    assert capped.fits
    assert 0 < capped.ctx == capped.max_ctx < 8192


def test_default_budget_never_takes_what_is_not_there() -> None:
    assert default_budget(total=16 * 2**30, available=15 * 2**30) == 12 * 2**30
    assert default_budget(total=16 * 2**30, available=2**30) == 2**30 * 9 // 10


@pytest.mark.parametrize("windows", [(), (512, 512, 512, 512, 512, 0), (16,) * 6])
def test_pools_stay_in_the_budget_and_hold_one_request(windows: tuple[int, ...]) -> None:
    shape = config(n_layers=6, windows=windows)
    sizes = block_bytes(shape, "f16")
    least = sum(n * s for n, s in zip([window_blocks(g, 4096) for g in shape.cache_groups], sizes, strict=True))
    for budget in (least, least + 1, 3 * least, 100 * least):
        pools = pool_sizes(shape.cache_groups, sizes, budget, 4096, max_seqs=8, most_tokens=8 * 4096)
        assert pools.bytes <= budget
        assert all(n >= window_blocks(g, 4096) for n, g in zip(pools.blocks, shape.cache_groups, strict=True))
    with pytest.raises(MemoryBudgetError, match=str(least)):
        pool_sizes(shape.cache_groups, sizes, least - 1, 4096, max_seqs=8, most_tokens=8 * 4096)


def test_few_sequences_leave_the_plans_scratch_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence with guesses has eight rows of logits, as the plan says; pools must not take what fewer would need."""
    monkeypatch.setattr("edgellm.opening.runtime_bytes", lambda: 0)
    file = ModelFile.open(tiny_gguf(tmp_path / "tiny.gguf", context_length=4096))
    for max_seqs in (1, 2, 7, 8, 64):
        _, least, _, _ = size_up(file, None, EngineConfig(ctx=1024, memory=1 << 40, max_seqs=max_seqs))
        budget = least.total_bytes + least.kv_bytes // 2
        _, plan, pools, _ = size_up(file, None, EngineConfig(ctx=1024, memory=budget, max_seqs=max_seqs))
        assert pools.bytes <= budget - (plan.total_bytes - plan.kv_bytes)
