"""Prompt ids of a job: through the chat template, raw, or fill-in-the-middle; cut to the context where allowed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from edgellm.chat.template import ChatTemplate
from edgellm.errors import ContextLengthError, RequestError
from edgellm.hub.modelfile import check_template
from edgellm.server.catalog import ModelRecord
from edgellm.server.job import Job
from edgellm.server.truncate import fit_turns

__all__ = ["build_prompt", "chat_turns", "fim_ids", "prompt_text"]

_log = logging.getLogger("edgellm.server")
_FIM = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""Names of the three control tokens, in the order in which they stand around prefix, suffix and answer."""


def build_prompt(
    job: Job, record: ModelRecord, llm: Any, kwargs: Mapping[str, Any], limit: int
) -> tuple[list[int], tuple[int, int] | None]:
    """Prompt ids, and what was dropped (messages, tokens) when a chat had to be cut.

    `limit`: tokens of context; one of them is for the answer. `kwargs` go to the template.
    Raises ContextLengthError when the prompt does not fit, RequestError for what the model cannot do.
    """
    if job.messages is None:
        ids = _plain_ids(job, llm)
    else:
        turns = chat_turns(job, record)
        template = _template(job, llm)
        ids = _chat_ids(turns, job, template, kwargs)
        if len(ids) >= limit and job.truncate:
            return _cut(turns, ids, job, template, kwargs, limit)
    if job.context:
        ids = _after_context(job.context, ids, llm)
    if len(ids) >= limit:
        raise ContextLengthError(len(ids), limit)
    return ids, None


def prompt_text(job: Job, llm: Any) -> str:
    """The prompt as the client gave it: the last message, the text, or what the ids say."""
    if job.messages is not None:
        return str(job.messages[-1]["content"])
    return llm.detokenize(job.prompt) if isinstance(job.prompt, tuple) else job.prompt or ""


def chat_turns(job: Job, record: ModelRecord) -> list[dict[str, Any]]:
    """The job's messages behind the model's own: its system text unless the chat brings one, its stored messages."""
    given = list(job.messages or ())
    system = record.system if job.system is None else job.system
    first = []
    if given and given[0]["role"] == "system":
        first = [given.pop(0)]
    elif system:
        first = [{"role": "system", "content": system}]
    return [*first, *({**message} for message in record.messages), *given]


def _template(job: Job, llm: Any) -> Any:
    """The request's own template, or the model's."""
    if job.template is None:
        return llm.template
    check_template(job.template)
    return ChatTemplate(job.template, llm.tokenizer)


def _chat_ids(turns: list[dict[str, Any]], job: Job, template: Any, kwargs: Mapping[str, Any]) -> list[int]:
    """Ids of a chat. When the last turn is the assistant's, the answer goes on from its text."""
    tools = list(job.tools) if job.tools and job.tool_choice != "none" else None
    goes_on = turns[-1]["role"] == "assistant" and not turns[-1].get("tool_calls") if turns else False
    if goes_on and not turns[-1]["content"].strip():
        turns, goes_on = turns[:-1], False
    if goes_on:
        kwargs = {**kwargs, "continue_final_message": True}
    return list(template.encode(turns, tools=tools, add_generation_prompt=not goes_on, **kwargs))


def _cut(
    turns: list[dict[str, Any]],
    whole: list[int],
    job: Job,
    template: Any,
    kwargs: Mapping[str, Any],
    limit: int,
) -> tuple[list[int], tuple[int, int]]:
    """A chat cut to the context. Room for an answer (an eighth of the context) is made where turns can be dropped,
    so that a long chat does not end in answers of one token."""
    known: dict[int, list[int]] = {}

    def fits_in(room: int) -> Any:
        def fits(some: list[dict[str, Any]]) -> bool:
            if len(some) not in known:
                known[len(some)] = _chat_ids(some, job, template, kwargs)
            return len(known[len(some)]) <= room

        return fits

    kept = fit_turns(turns, fits_in(limit - max(limit // 8, 1))) or fit_turns(turns, fits_in(limit - 1))
    if kept is None:
        shortest = min(known.values(), key=len)
        raise ContextLengthError(
            len(shortest),
            limit,
            f"the system message and the last turn alone have {len(shortest)} tokens but the context holds {limit} "
            "(one must stay free for the answer); shorten them or raise num_ctx",
        )
    ids = known[len(kept)]
    dropped = len(turns) - len(kept), len(whole) - len(ids)
    _log.warning("dropped %d oldest messages (%d tokens) to fit a context of %d", *dropped, limit)
    return ids, dropped


def _plain_ids(job: Job, llm: Any) -> list[int]:
    """Ids of a prompt that goes to the model as it is."""
    if isinstance(job.prompt, tuple):
        vocab_size = llm.tokenizer.vocab_size
        if any(not 0 <= token < vocab_size for token in job.prompt):
            raise RequestError(f"prompt: token ids must lie between 0 and {vocab_size - 1}")
        return list(job.prompt)
    text = job.prompt or ""
    if job.suffix is not None:
        return _infill(text, job.suffix, job.model, llm)
    ids: list[int] = llm.tokenizer.encode(text, special=True)
    # A raw prompt often spells out the beginning-of-text token that the tokenizer adds by itself.
    if len(ids) > 1 and ids[0] == ids[1] == llm.tokenizer.bos_id:
        del ids[0]
    return ids


def fim_ids(tokenizer: Any) -> tuple[int, int, int] | None:
    """Ids of the prefix, suffix and middle marks; None when the vocabulary has none."""
    for names in _FIM:
        found = [tokenizer.encode(name, special=True, bos=False) for name in names]
        if all(len(ids) == 1 for ids in found):
            return found[0][0], found[1][0], found[2][0]
    return None


def _infill(prefix: str, suffix: str, model: str, llm: Any) -> list[int]:
    marks = fim_ids(llm.tokenizer)
    if marks is None:
        raise RequestError(f"{model} does not support insert: its vocabulary has no fill-in-the-middle tokens")
    tokenizer = llm.tokenizer
    before = tokenizer.encode(prefix, special=False, bos=False)
    after = tokenizer.encode(suffix, special=False, bos=False)
    start = [tokenizer.bos_id] if tokenizer.add_bos else []
    return [*start, marks[0], *before, marks[1], *after, marks[2]]


def _after_context(context: tuple[int, ...], ids: list[int], llm: Any) -> list[int]:
    """The conversation so far, then the new turn without a second beginning-of-text token."""
    vocab_size = llm.tokenizer.vocab_size
    if any(not 0 <= token < vocab_size for token in context):
        raise RequestError(f"context: token ids must lie between 0 and {vocab_size - 1}")
    if ids and llm.tokenizer.add_bos and ids[0] == llm.tokenizer.bos_id:
        ids = ids[1:]
    return [*context, *ids]
