"""From a model's name and settings to a running engine: file, budget, backend, weights, block pools, in that order, so
that what does not fit is refused before anything is allocated."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgellm import __version__
from edgellm.backends import create
from edgellm.backends.base import Backend
from edgellm.backends.split import SplitBackend, layers_outside
from edgellm.chat.template import ChatTemplate
from edgellm.config import EngineConfig, home
from edgellm.engine.draft import DraftModel
from edgellm.engine.engine import Engine
from edgellm.engine.lookup import PromptLookup
from edgellm.engine.model_runner import ModelRunner
from edgellm.engine.prompt_cache import PromptCache, check_path
from edgellm.engine.speculate import DEPTH, Speculator, split_draft
from edgellm.engine.swap import SwapFile
from edgellm.errors import ModelNotFound, RequestError
from edgellm.loader import GGUFFile, open_gguf
from edgellm.loader.huge_pages import HugePages
from edgellm.memory import (
    MemoryPlan,
    PoolSizes,
    block_bytes,
    check_budget,
    default_budget,
    kv_bytes,
    machine_memory,
    make_plan,
    pool_sizes,
    runtime_bytes,
    scratch_bytes,
)
from edgellm.models.config import ModelConfig
from edgellm.models.registry import config_from_metadata, load_model
from edgellm.pairing import check_pair, compare_files
from edgellm.placement import device_budget, model_bytes
from edgellm.tokenizer import Tokenizer, from_metadata

__all__ = ["ModelFile", "Opened", "Settings", "open_engine"]

log = logging.getLogger(__name__)

PARTIAL_CTX = 4096
"""Context of a model whose weights do not all fit, unless one is given."""
MAX_THREADS = 1024
CONTEXTS = 8
"""Without a given budget the pool holds this many whole contexts at most: a small model need not fill the machine."""


@dataclass(frozen=True)
class Settings:
    """What `LLM` was asked for. `engine.ctx` 0: as long as the model and the budget allow."""

    engine: EngineConfig
    backend: str = "auto"
    threads: int | None = None
    draft: str | None = None
    draft_max: int | None = None
    prompt_cache: Path | None = None
    template: str | None = None
    progress: Callable[[int, int, str], None] | None = None
    partial: bool = False
    name: str | None = None


@dataclass(frozen=True)
class Opened:
    """A running model's parts; `on_close` in order, after the engine is closed."""

    path: Path
    engine: Engine
    tokenizer: Any
    template: Any
    on_close: tuple[Callable[[], None], ...]
    draft_path: Path | None = None
    huge_pages: HugePages | None = None


@dataclass(frozen=True)
class ModelFile:
    """An open model file, read as far as it goes without weights."""

    name: str
    """As it was asked for; of a path the last part."""
    path: Path
    gguf: GGUFFile
    config: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    def open(cls, path_or_name: str | os.PathLike[str], name: str | None = None) -> ModelFile:
        """Read metadata and tokenizer. `name`: what messages call it instead.

        Raises ModelNotFound, GGUFError, UnsupportedModel, TokenizerError.
        """
        path = find_file(path_or_name)
        gguf = open_gguf(path)
        try:
            config, tokenizer = config_from_metadata(gguf.metadata), from_metadata(gguf.metadata)
        except BaseException:
            gguf.close()
            raise
        config = replace(config, vocab_size=config.vocab_size or tokenizer.vocab_size)
        return cls(name or Path(path_or_name).name, path, gguf, config, tokenizer)


def open_engine(path_or_name: str | os.PathLike[str], settings: Settings) -> Opened:
    """Open a model, and its draft. Raises what `LLM` says."""
    _check(settings)
    with ExitStack() as opened:
        target = ModelFile.open(path_or_name, settings.name)
        opened.callback(target.gguf.close)
        lookup, draft_name = _draft_kinds(settings.draft)
        draft = None
        if draft_name:
            draft = ModelFile.open(draft_name)
            opened.callback(draft.gguf.close)
            check_pair(compare_files(target, draft), target.name, draft.name)
        template = ChatTemplate.from_metadata(
            target.gguf.metadata, target.tokenizer, source=settings.template, model=target.name
        )
        backend = create(settings.backend, settings.threads, settings.progress)
        opened.callback(backend.close)
        # Now, so that all libraries are loaded and count as what the process holds already.
        wanted = _wanted(target, backend, settings.engine)
        sized = size_up(target, draft, wanted, backend.memory_limit, settings.partial, backend)
        config, plan, pools, draft_pools = sized
        if settings.partial:
            backend.keep_weights(plan.weights_bytes)
        placed = _place(target, backend, plan, pools, settings)
        opened.callback(placed.close)
        runner = _runner(target, placed, pools, config)
        swap = None
        if config.swap_space:
            swap = SwapFile(runner, len(pools.blocks), config.swap_space, home() / "swap")
            opened.callback(swap.close)
        model = _draft_model(target, draft, backend, draft_pools, config) if draft and draft_pools else None
        speculator = None
        if lookup or model:
            most = min(settings.draft_max or DEPTH, DEPTH)
            shares = _context_share(target, config), _context_share(draft, config) if draft else 0.0
            speculator = Speculator(config.ctx, PromptLookup() if lookup else None, model, most, *shares)
        engine = Engine(config, target.config, runner, target.tokenizer, pools.blocks, swap, speculator)
        engine.plan, engine.facts = plan, {"backend": placed.describe()}
        if speculator:
            speculator.measure(runner, engine.kv)
        if settings.prompt_cache:
            key = cache_key(target, placed, config)
            prompt_cache = PromptCache(settings.prompt_cache, key, engine.kv, runner)
            prompt_cache.load()
            engine.before_close.append(prompt_cache.save)
        huge_pages = None
        if placed.reads_maps:
            maps = [*target.gguf.maps, *(draft.gguf.maps if draft else ())]
            huge_pages = HugePages(
                maps,
                busy_s=lambda: engine.metrics.busy_s,
                idle=lambda: not engine.has_work,
                available=lambda: machine_memory()[1],
            )
            opened.callback(huge_pages.close)
        files = opened.pop_all()
    draft_path = draft.path if draft else None
    return Opened(target.path, engine, target.tokenizer, template, (files.close,), draft_path, huge_pages)


def _check(settings: Settings) -> None:
    """Refuse what is wrong whatever the model is, before one is opened."""
    if settings.draft_max is not None and settings.draft_max < 1:
        raise RequestError(f"draft_max must be 1 or more, not {settings.draft_max}")
    if settings.threads and settings.threads not in range(MAX_THREADS + 1):
        raise RequestError(f"threads must be a whole number from 1 to {MAX_THREADS}, not {settings.threads!r}")
    if settings.prompt_cache:
        check_path(settings.prompt_cache)


def _wanted(file: ModelFile, backend: Backend, engine: EngineConfig) -> EngineConfig:
    """The settings; for a device with memory of its own with a budget that fits it."""
    free = backend.free_bytes()
    if free is None:
        return engine
    weights = sum(map(backend.weight_bytes, file.gguf.tensors.values()))
    return device_budget(file.config, weights, engine, free)


def _place(file: ModelFile, backend: Backend, plan: MemoryPlan, pools: PoolSizes, settings: Settings) -> Backend:
    """The backend itself where it holds the model, else one that runs the first layers on the CPU."""
    free = backend.free_bytes()
    if free is None:
        return backend
    weights = {name: backend.weight_bytes(tensor) for name, tensor in file.gguf.tensors.items()}
    blocks = block_bytes(file.config, settings.engine.kv_type, settings.engine.block_size)
    scratch = plan.scratch_bytes + plan.draft_bytes
    outside = layers_outside(model_bytes(file.config, weights, blocks, pools.blocks, scratch), free)
    if not outside:
        return backend
    cpu = create("cpu", settings.threads, settings.progress)
    placed = SplitBackend(cpu, backend, outside, file.config.n_layers)
    log.warning("%s: %s", file.name, placed.words)
    return placed


def _draft_model(
    target: ModelFile, draft: ModelFile, backend: Backend, pools: PoolSizes, config: EngineConfig
) -> DraftModel:
    vocab = min(target.config.vocab_size, draft.config.vocab_size)
    backend.keep_weights(None)  # a draft is small, and worth nothing if it is slow
    runner = _runner(draft, backend, pools, config)
    return DraftModel(runner, draft.config, pools.blocks, config.block_size, config.ctx, vocab)


def _context_share(file: ModelFile, config: EngineConfig) -> float:
    """Bytes of cache that one more token adds for good, over bytes of weights."""
    short, long = (kv_bytes(file.config, tokens, config.kv_type) for tokens in (1 << 20, 1 << 21))
    return (long - short) / (1 << 20) / file.gguf.nbytes


def _draft_kinds(draft: str | None) -> tuple[bool, str | None]:
    """`--draft`: "lookup", a model, or both with a comma between: (lookup, model)."""
    parts = split_draft(draft or "")
    models = [part for part in parts if part != "lookup"]
    if len(models) > 1:
        raise RequestError(f"one draft model at most, not {len(models)}: {', '.join(models)}")
    return "lookup" in parts, models[0] if models else None


def _runner(file: ModelFile, backend: Backend, pools: PoolSizes, config: EngineConfig) -> ModelRunner:
    return ModelRunner(load_model(file.gguf, backend), backend, pools.blocks, config.kv_type, config.block_size)


def find_file(path_or_name: str | os.PathLike[str]) -> Path:
    """A path as it is, or the file of a stored name; a bare word is a file only where no model has that name."""
    if isinstance(path_or_name, os.PathLike):
        return Path(path_or_name)
    from edgellm.hub.store import resolve

    try:
        return resolve(path_or_name)
    except (ModelNotFound, RequestError):
        if not os.path.isfile(path_or_name):
            raise
    return Path(path_or_name)


def _budget(memory: int | None, limit: int | None) -> int:
    """What was given, or what the machine allows; never more than the device holds."""
    if memory is None or limit is None or memory <= limit:
        return default_budget(limit=limit) if memory is None else memory
    log.warning("the device holds at most %d bytes, so that is the memory budget, not %d", limit, memory)
    return limit


def _partial(plan: MemoryPlan, name: str) -> int:
    """Bytes of weights that the budget leaves room for when not all fit."""
    kept = max(0, plan.weights_bytes - max(0, plan.total_bytes - plan.budget_bytes))
    if kept < plan.weights_bytes:
        log.warning(
            "%s: %d of %d bytes of weights fit the memory budget; the others are read from the file for every token",
            *(name, kept, plan.weights_bytes),
        )
    return kept


def _kept_bytes(file: ModelFile, backend: Backend | None) -> int:
    """Bytes of the machine's memory for a file's weights. What a device with memory of its own keeps is its affair."""
    if backend is None or backend.free_bytes() is not None:
        return file.gguf.nbytes
    beyond = sum(backend.weight_bytes(tensor) - tensor.data.nbytes for tensor in file.gguf.tensors.values())
    return file.gguf.nbytes + beyond


def size_up(
    target: ModelFile,
    draft: ModelFile | None,
    config: EngineConfig,
    limit: int | None = None,
    partial: bool = False,
    backend: Backend | None = None,
) -> tuple[EngineConfig, MemoryPlan, PoolSizes, PoolSizes | None]:
    """The context and the block pools that fit the budget, which the device's `limit` caps. With `partial` the weights
    get what the rest leaves; a context that was not given is then short. `backend`: weights count as it keeps them.
    Raises MemoryBudgetError with the numbers."""
    model, name = target.config, target.name
    budget = _budget(config.memory, limit)
    draft_bytes = 0
    if draft:
        length = min(draft.config.context_length, config.ctx or model.context_length)
        draft_bytes = _kept_bytes(draft, backend) + kv_bytes(draft.config, length, config.kv_type)
    held = runtime_bytes()

    def planned(weights: int, ctx: int | None) -> MemoryPlan:
        return make_plan(model, weights, config.kv_type, ctx, budget, draft_bytes, runtime_bytes=held)

    weights = _kept_bytes(target, backend)
    plan = planned(weights, config.ctx or None)
    if partial and not plan.fits:
        ctx = config.ctx or min(model.context_length, PARTIAL_CTX)
        plan = planned(_partial(planned(weights, ctx), name), ctx)
    check_budget(plan, name)
    ctx = plan.ctx
    if ctx > model.context_length and model.position_table:
        raise RequestError(f"{name} knows {model.context_length} positions: a context of {ctx} cannot be computed")
    if ctx > model.context_length:
        log.warning("%s was trained on %d tokens; a context of %d goes beyond that", name, model.context_length, ctx)
    elif not config.ctx and ctx < model.context_length:
        log.warning("%s: the context is %d tokens, not %d: memory budget %d", name, ctx, model.context_length, budget)
    most = (CONTEXTS if config.memory is None else config.max_seqs) * ctx
    left = budget - plan.total_bytes + plan.kv_bytes
    more_scratch = max(0, scratch_bytes(model, n_logits=config.max_seqs) - plan.scratch_bytes)
    left -= min(more_scratch, left - plan.kv_bytes)
    if not draft:
        return replace(config, ctx=ctx), plan, _pools(model, config, left, ctx, most), None
    # What is left is shared as one token costs in each, so that the draft can follow whatever the target holds.
    left += kv_bytes(draft.config, length, config.kv_type)
    shares = [kv_bytes(m, min(ctx, m.context_length), config.kv_type) for m in (model, draft.config)]
    own = left * shares[0] // sum(shares)
    draft_ctx = min(ctx, draft.config.context_length)
    draft_pools = _pools(draft.config, config, left - own, draft_ctx, most)
    return replace(config, ctx=ctx), plan, _pools(model, config, own, ctx, most), draft_pools


def _pools(model: ModelConfig, config: EngineConfig, left: int, ctx: int, most: int) -> PoolSizes:
    sizes = block_bytes(model, config.kv_type, config.block_size)
    return pool_sizes(model.cache_groups, sizes, left, ctx, config.max_seqs, most)


def cache_key(target: ModelFile, backend: Backend, config: EngineConfig) -> dict[str, Any]:
    """Everything the rows of a cache block depend on besides the tokens; plain JSON data. Of the backend also its
    instruction set: the same answer bit for bit holds within one."""
    groups = [[group.kind, list(group.layers), group.window] for group in target.config.cache_groups]
    return {
        "version": __version__,
        "model": target.gguf.digest,
        "backend": {**backend.describe(), "machine": platform.machine()},
        "kv_type": config.kv_type,
        "block_size": config.block_size,
        "groups": groups,
    }
