"""From a job to what the engine takes: prompt ids, sampling parameters, and a parser for the reply."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edgellm.chat.tools import Parser
from edgellm.config import SamplingParams
from edgellm.errors import MemoryBudgetError, RequestError
from edgellm.server.job import Job
from edgellm.server.manager import LoadedModel
from edgellm.server.options import parse_options
from edgellm.server.prompt import build_prompt, prompt_text
from edgellm.server.style import Style, reply_style

__all__ = ["Prepared", "context_limit", "prepare"]

_log = logging.getLogger("edgellm.server")
MAX_STOPS, MAX_STOP_CHARS = 64, 8192
"""Every new piece of text is searched for all of them, on the thread that all requests share."""


@dataclass(frozen=True)
class Prepared:
    """A job ready for the engine. `params` has one entry per answer; `parser` makes a reply parser for one."""

    ids: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    parser: Callable[[], Parser]
    shown: frozenset[int]
    """Control tokens whose names the parser reads."""
    truncated: tuple[int, int] | None
    echo: str = ""
    """Text that each answer begins with."""


def prepare(job: Job, loaded: LoadedModel) -> Prepared:
    """Builds the prompt and checks it against the model and its context.

    Raises RequestError (a capability the model lacks, a bad option), ContextLengthError, MemoryBudgetError,
    TemplateError, GrammarError: all before anything is computed.
    """
    record, llm = loaded.record, loaded.llm
    if not llm.config.causal:
        raise RequestError(f'"{record.name}" does not support {"generate" if job.messages is None else "chat"}')
    stored = parse_options(record.params, source=record.name)
    ctx = context_limit(job.num_ctx or stored.num_ctx, llm, record.name)
    style = reply_style(job, loaded)
    ids, truncated = build_prompt(job, record, llm, style.template_kwargs, ctx)
    if not ids:
        raise RequestError("the prompt is empty")
    params = _params(job, stored.sampling, style, llm, ids, ctx)
    echo = prompt_text(job, llm) if job.echo else ""
    return Prepared(tuple(ids), params, style.parser(ids), style.shown, truncated, echo)


def context_limit(asked: int | None, llm: Any, name: str) -> int:
    """Tokens one request may hold: what was asked for, within what the model was trained for and what memory allows.

    Raises MemoryBudgetError with both numbers when the model could hold `asked` but the memory budget cannot.
    """
    if asked is None or asked <= llm.ctx:
        return asked or llm.ctx
    trained = llm.config.context_length
    if llm.ctx >= trained:
        _log.warning("num_ctx %d is above what %s was trained for; using %d", asked, name, llm.ctx)
        return int(llm.ctx)
    raise MemoryBudgetError(
        f"num_ctx {asked} needs more than the server gives {name}: {llm.ctx} tokens at most "
        "(start it with a larger --ctx or --memory, or ask for less)"
    )


def _params(
    job: Job, stored: dict[str, Any], style: Style, llm: Any, ids: list[int], ctx: int
) -> tuple[SamplingParams, ...]:
    """Sampling parameters of every answer: defaults, then the model's stored ones, then the request's."""
    fields = {**stored, **job.sampling}
    asked, room = fields.get("max_tokens", -1), ctx - len(ids)
    # -1: to the end token or the context; -2: to the context, whatever the model says.
    fields["ignore_eos"] = asked == -2
    fields["max_tokens"] = room if asked < 0 else min(asked, room)
    stops = fields.get("stop", ())
    if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARS:
        raise RequestError(f"stop: at most {MAX_STOPS} strings with {MAX_STOP_CHARS} characters together")
    vocab_size = llm.tokenizer.vocab_size
    if any(token >= vocab_size for token in fields.get("logit_bias") or ()):
        raise RequestError(f"logit_bias: token ids must be below {vocab_size}")
    base = SamplingParams(**fields, grammar=style.grammar(ids))
    if job.count == 1:
        return (base,)
    seeds = [None if base.seed is None else base.seed + i for i in range(job.count)]
    return tuple(replace(base, seed=seed) for seed in seeds)
