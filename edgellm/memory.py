"""The one memory budget: what a model, its cache and a step's scratch take, from plain numbers.

Used before anything is allocated: by the engine to size its block pools, and by the planner for files that may not
even be here. Everything is in bytes. Weights are memory-mapped, yet they count: a weight page that does not stay in
memory is read from disk for every token.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.config import BLOCK_SIZE
from edgellm.errors import MemoryBudgetError, RequestError
from edgellm.models.config import CacheGroup, ModelConfig

__all__ = ["MAX_CHUNK", "MemoryPlan", "PoolSizes", "block_bytes", "check_budget", "default_budget", "kv_bytes"]
__all__ += ["kv_bytes_per_token", "make_plan", "peak_bytes", "pool_sizes", "runtime_bytes", "scratch_bytes"]
__all__ += ["window_blocks"]

KV_TYPES = {"f32": (4, 1), "f16": (2, 1), "q8_0": (34, 32)}
"""Bytes per elements."""

MOST_LIBRARIES = 96 << 20

MAX_CHUNK = 512
"""Tokens of one prompt chunk at most; a window's cache holds the window and one chunk."""

PASS_TOKENS = 64
"""Prompt tokens that are computed beside running answers at once, at most."""


def row_bytes(config: ModelConfig, kv_type: str) -> int:
    """Bytes of one token's K and V in one layer."""
    if kv_type not in KV_TYPES:
        raise RequestError(f"kv_type must be one of {', '.join(KV_TYPES)}, not {kv_type!r}")
    n_bytes, per = KV_TYPES[kv_type]
    return config.n_kv_heads * sum(-(-dim // per) * n_bytes for dim in (config.k_dim, config.v_dim))


def block_bytes(config: ModelConfig, kv_type: str, block_size: int = BLOCK_SIZE) -> tuple[int, ...]:
    """Bytes of one block in each cache group (all its layers together)."""
    row = row_bytes(config, kv_type)
    return tuple(row * block_size * len(group.layers) for group in config.cache_groups)


def kv_bytes_per_token(config: ModelConfig, kv_type: str) -> int:
    """Bytes one more token costs in all layers, as long as no window has passed it."""
    return row_bytes(config, kv_type) * config.n_layers


def window_blocks(group: CacheGroup, ctx: int, block_size: int = BLOCK_SIZE, chunk: int = MAX_CHUNK) -> int:
    """Blocks one request of `ctx` tokens can hold at once in a group: all of them, or the window and one chunk."""
    whole = -(-ctx // block_size)
    if not group.window:
        return whole
    return min(whole, -(-(group.window + min(chunk, ctx)) // block_size) + 2)


def kv_bytes(config: ModelConfig, ctx: int, kv_type: str, chunk: int = MAX_CHUNK) -> int:
    """Bytes of one request's cache at `ctx` tokens, windowed layers at their bound."""
    sizes = block_bytes(config, kv_type)
    return sum(
        size * window_blocks(group, ctx, chunk=chunk) for size, group in zip(sizes, config.cache_groups, strict=True)
    )


def scratch_bytes(config: ModelConfig, chunk: int = MAX_CHUNK, n_logits: int = 8) -> int:
    """Estimate of one step's activations and logits: float32 rows of one layer twice (buffers are reused by size,
    which leaves gaps; measured 1.6 to 2.2 on three models), and `n_logits` rows of the vocabulary twice (the backend's
    and the sampler's copy). A pass beside it (PASS_TOKENS; 5 to 20 MB on those models) has room in what this is too
    much without one."""
    attention = (config.n_heads + config.n_kv_heads) * (config.k_dim + config.v_dim)
    experts = config.n_experts_used * (2 * config.expert_ffn_dim + config.dim)
    per_token = 4 * config.dim + attention + 3 * config.ffn_dim + experts
    return 8 * (chunk * per_token + n_logits * config.vocab_size)


def machine_memory() -> tuple[int, int]:
    """(total, available) bytes of this machine; a container's limit counts as the total."""
    import psutil

    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                limit = int(file.read())
        except (OSError, ValueError):
            continue
        total, available = min(total, limit), min(available, limit)
    return total, available


def default_budget(total: int | None = None, available: int | None = None, limit: int | None = None) -> int:
    """Budget when none was given: three quarters of the machine, and not more than is available now (a tenth of it
    left free), so that nothing is pushed out to swap; nor more than the device's own `limit`, where it has one."""
    if total is None or available is None:
        total, available = machine_memory()
    return min(total * 3 // 4, available * 9 // 10, *([] if limit is None else [limit]))


@dataclass(frozen=True)
class PoolSizes:
    """Blocks per cache group (the null block not counted), and the bytes they take when all are in use."""

    blocks: tuple[int, ...]
    bytes: int


def pool_sizes(
    groups: Sequence[CacheGroup],
    sizes: Sequence[int],
    budget: int,
    ctx: int,
    max_seqs: int,
    most_tokens: int,
    chunk: int = MAX_CHUNK,
    block_size: int = BLOCK_SIZE,
) -> PoolSizes:
    """Share `budget` bytes out among the groups. Each holds at least one request of `ctx` tokens; windowed groups get
    room for `max_seqs` windows but at most half of what remains, full ones the rest, up to `most_tokens`."""
    least = [window_blocks(group, ctx, block_size, chunk) for group in groups]
    rest = budget - sum(n * size for n, size in zip(least, sizes, strict=True))
    if rest < 0:
        raise MemoryBudgetError(
            f"one request of {ctx} tokens needs {budget - rest} bytes of KV cache but {max(budget, 0)} are left of "
            "the memory budget; lower --ctx, choose a smaller --kv-type, or raise --memory"
        )
    blocks = list(least)
    full = [i for i, group in enumerate(groups) if not group.window]
    windowed = [i for i, group in enumerate(groups) if group.window]
    # A bounded share first: windows stop being useful beyond max_seqs of them, the rest is prefix cache.
    for members, share, most in (
        (windowed, rest // 2 if full else rest, [least[i] * max_seqs for i in windowed]),
        (full, None, [max(least[i], -(-most_tokens // block_size)) for i in full]),
    ):
        share = rest if share is None else share
        for i, cap in zip(members, most, strict=True):
            extra = max(0, min(cap - blocks[i], share // len(members) // sizes[i]))
            blocks[i] += extra
            rest -= extra * sizes[i]
    return PoolSizes(tuple(blocks), sum(n * size for n, size in zip(blocks, sizes, strict=True)))


@dataclass(frozen=True)
class MemoryPlan:
    """What running a model takes. `kv_bytes` is one request at `ctx` tokens; `max_ctx` the longest that fits."""

    ctx: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    scratch_bytes: int
    draft_bytes: int
    runtime_bytes: int
    total_bytes: int
    budget_bytes: int
    fits: bool
    max_ctx: int


def make_plan(
    config: ModelConfig,
    weights_bytes: int,
    kv_type: str = "f16",
    ctx: int | None = None,
    budget: int | None = None,
    draft_bytes: int = 0,
    runtime_bytes: int = 0,
    n_logits: int = 8,
) -> MemoryPlan:
    """The plan for one request of `ctx` tokens (None: the trained length, or less where the budget is smaller);
    `n_logits`: rows of logits that a step may make, as in `scratch_bytes`."""
    budget = default_budget() if budget is None else budget
    scratch = scratch_bytes(config, n_logits=n_logits)
    fixed = weights_bytes + scratch + draft_bytes + runtime_bytes
    max_ctx = _longest(config, kv_type, budget - fixed)
    if ctx is None:
        ctx = max(1, min(config.context_length, max_ctx))
    kv = kv_bytes(config, ctx, kv_type)
    return MemoryPlan(
        ctx=ctx,
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes_per_token(config, kv_type),
        kv_bytes=kv,
        scratch_bytes=scratch,
        draft_bytes=draft_bytes,
        runtime_bytes=runtime_bytes,
        total_bytes=fixed + kv,
        budget_bytes=budget,
        fits=fixed + kv <= budget,
        max_ctx=max_ctx,
    )


def check_budget(plan: MemoryPlan, name: str) -> None:
    """Refuse a plan that does not fit, with its numbers."""
    if plan.fits:
        return
    parts = [("weights", plan.weights_bytes), (f"KV cache of {plan.ctx} tokens", plan.kv_bytes)]
    parts += [("scratch", plan.scratch_bytes), ("draft model", plan.draft_bytes), ("runtime", plan.runtime_bytes)]
    listed = " + ".join(f"{label} {n}" for label, n in parts if n)
    advice = f"--ctx {plan.max_ctx} would fit" if plan.max_ctx else "not even a short context fits: a smaller quant?"
    raise MemoryBudgetError(
        f"{name} needs {plan.total_bytes} bytes ({listed}) but the memory budget is {plan.budget_bytes}; {advice}"
    )


def _longest(config: ModelConfig, kv_type: str, left: int) -> int:
    """The most tokens whose cache fits `left` bytes, at most the trained length; a multiple of the block size below
    that. kv_bytes rises with ctx, so bisect on blocks."""
    if kv_bytes(config, config.context_length, kv_type) <= left:
        return config.context_length
    low, high = 0, -(-config.context_length // BLOCK_SIZE)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if kv_bytes(config, middle * BLOCK_SIZE, kv_type) <= left else (low, middle)
    return low * BLOCK_SIZE


def runtime_bytes() -> int:
    """What this process holds already: its own pages, and those of mapped files as far as they are libraries (the rest
    are the weights of models, which count by themselves)."""
    import psutil

    info = psutil.Process(os.getpid()).memory_info()
    mapped = int(getattr(info, "shared", 0))
    return int(info.rss) - mapped + min(mapped, MOST_LIBRARIES)


def peak_bytes() -> int:
    """The most memory this process ever held, pages of mapped files included."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass  # not Linux
    import resource  # on Linux its figure would count what the parent held before this program started

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
