"""From a model's name and settings to a running engine: file, budget, backend, weights, block pools, in that order, so
that what does not fit is refused before anything is allocated."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgellm import __version__
from edgellm.config import EngineConfig, home
from edgellm.engine.engine import Engine
from edgellm.engine.model_runner import ModelRunner
from edgellm.engine.prompt_cache import PromptCache
from edgellm.engine.swap import SwapFile
from edgellm.memory import (
    PoolSizes,
    block_bytes,
    check_budget,
    default_budget,
    kv_bytes,
    make_plan,
    pool_sizes,
    private_bytes,
)
from edgellm.models.config import ModelConfig

__all__ = ["Opened", "Settings", "open_engine"]

log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Opened:
    """A running model's parts; `on_close` in order, after the engine is closed."""

    path: Path
    engine: Engine
    tokenizer: Any
    template: Any
    on_close: tuple[Callable[[], None], ...]


def open_engine(path_or_name: str | os.PathLike[str], settings: Settings) -> Opened:
    """Open a model. Raises what `LLM` says."""
    from edgellm.backends import create
    from edgellm.chat.template import ChatTemplate
    from edgellm.loader import open_gguf
    from edgellm.models.registry import config_from_metadata, load_model
    from edgellm.tokenizer import from_metadata

    path = find_file(path_or_name)
    gguf = open_gguf(path)
    try:
        model_config = config_from_metadata(gguf.metadata)
        tokenizer = from_metadata(gguf.metadata)
        if not model_config.vocab_size:
            model_config = replace(model_config, vocab_size=tokenizer.vocab_size)
        config, pools = size_up(path.name, model_config, gguf.nbytes, settings.engine)
        template = ChatTemplate.from_metadata(gguf.metadata, tokenizer, source=settings.template)
        backend = create(settings.backend, settings.threads, settings.progress)
        model = load_model(gguf, backend)
        runner = ModelRunner(model, backend, pools.blocks, config.kv_type, config.block_size)
        swap = None
        if config.swap_space:
            swap = SwapFile(runner, len(pools.blocks), config.swap_space, home() / "swap")
        engine = Engine(config, model.config, runner, tokenizer, pools.blocks, swap)
        if settings.prompt_cache:
            key = cache_key(gguf.digest, backend.name, config, model.config)
            prompt_cache = PromptCache(settings.prompt_cache, key, engine.kv, runner)
            prompt_cache.load()
            engine.before_close.append(prompt_cache.save)
    except BaseException:
        gguf.close()
        raise
    return Opened(path, engine, tokenizer, template, (gguf.close,))


def find_file(path_or_name: str | os.PathLike[str]) -> Path:
    """A path as it is, or the file of a stored name."""
    if isinstance(path_or_name, os.PathLike) or os.path.exists(path_or_name):
        return Path(path_or_name)
    from edgellm.hub.store import resolve

    return resolve(path_or_name)


def size_up(
    name: str, model: ModelConfig, weights_bytes: int, config: EngineConfig, draft_bytes: int = 0
) -> tuple[EngineConfig, PoolSizes]:
    """The context and the block pools that fit the budget. Raises MemoryBudgetError with the numbers."""
    budget = default_budget() if config.memory is None else config.memory
    plan = make_plan(
        model, weights_bytes, config.kv_type, config.ctx or None, budget, draft_bytes, runtime_bytes=private_bytes()
    )
    check_budget(plan, name)
    ctx = plan.ctx
    if ctx > model.context_length:
        log.warning("%s was trained on %d tokens; a context of %d goes beyond that", name, model.context_length, ctx)
    elif not config.ctx and ctx < model.context_length:
        log.warning("%s: the context is %d tokens, not %d: memory budget %d", name, ctx, model.context_length, budget)
    most = (CONTEXTS if config.memory is None else config.max_seqs) * ctx
    left = budget - (plan.total_bytes - kv_bytes(model, ctx, config.kv_type))
    sizes = block_bytes(model, config.kv_type, config.block_size)
    pools = pool_sizes(model.cache_groups, sizes, left, ctx, config.max_seqs, most)
    return replace(config, ctx=ctx), pools


def cache_key(model_digest: str, backend: str, config: EngineConfig, model: ModelConfig) -> dict[str, Any]:
    """Everything the rows of a cache block depend on besides the tokens; plain JSON data."""
    groups = [[group.kind, list(group.layers), group.window] for group in model.cache_groups]
    return {
        "version": __version__,
        "model": model_digest,
        "backend": f"{backend} {platform.machine()}",
        "kv_type": config.kv_type,
        "block_size": config.block_size,
        "groups": groups,
    }
