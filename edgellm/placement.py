"""A device with memory of its own: the budget it gives, and what a model would take there, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgellm.backends.split import ModelBytes
from edgellm.config import EngineConfig
from edgellm.memory import default_budget, make_plan, runtime_bytes
from edgellm.models.config import ModelConfig

__all__ = ["device_budget", "model_bytes"]

USEFUL_CTX = 4096
"""A model that does not fit with this context (or its own, if shorter) is split."""
CONTEXTS = 8
"""Whole contexts that the device's memory is used for at most."""

SLACK = 16 << 20
"""What this process may grow by until its memory is counted again."""


def device_budget(config: ModelConfig, weights: int, engine: EngineConfig, free: int) -> EngineConfig:
    """Settings with a memory budget for a device with `free` bytes, unless one was given: that memory, as far as some
    whole contexts can use it; where the model does not fit, what one context takes, on the device and beside it."""
    if engine.memory is not None:
        return engine
    beside = runtime_bytes() + SLACK  # this process's own memory is the machine's, not the device's
    least = make_plan(config, weights, engine.kv_type, engine.ctx or min(config.context_length, USEFUL_CTX), free)
    if not least.fits:
        return replace(engine, ctx=least.ctx, memory=min(least.total_bytes, free + default_budget()) + beside)
    whole = make_plan(config, weights, engine.kv_type, engine.ctx or config.context_length, free)
    return replace(engine, memory=min(free, whole.total_bytes + (CONTEXTS - 1) * whole.kv_bytes) + beside)


def model_bytes(
    config: ModelConfig, weights: Mapping[str, int], block_bytes: Sequence[int], blocks: Sequence[int], scratch: int
) -> ModelBytes:
    """Weights and cache of each layer. `weights`: bytes of each tensor on the device; `block_bytes` and `blocks` per
    cache group, the null block not counted."""
    layers = [0] * config.n_layers
    for group, size, n in zip(config.cache_groups, block_bytes, blocks, strict=True):
        for layer in group.layers:
            layers[layer] += size // len(group.layers) * (n + 1)
    for name, size in weights.items():
        part = name.split(".")
        if part[0] == "blk" and int(part[1]) < config.n_layers:
            layers[int(part[1])] += size
    embedding, head = (weights.get(name, 0) for name in ("token_embd.weight", "output.weight"))
    return ModelBytes(tuple(layers), embedding, head or embedding, scratch, tied=not head)
