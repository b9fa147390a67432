"""The Python API: a model file opened for text in, text out.

from edgellm import LLM, SamplingParams
with LLM("demo") as llm:
    print(llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))[0].text)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from edgellm.config import EngineConfig, SamplingParams
from edgellm.engine.engine import Engine
from edgellm.engine.model_runner import Runner
from edgellm.engine.output import Completion, TokenEvent, TokenLogprobs
from edgellm.engine.request import Task
from edgellm.engine.thread import EngineThread, Stream
from edgellm.errors import BackendUnavailable, EdgeLLMError, RequestError
from edgellm.memory import peak_bytes
from edgellm.models.config import ModelConfig

__all__ = ["LLM", "Completion", "Stream", "TokenEvent", "TokenLogprobs", "memory_budget"]

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
T = TypeVar("T")


class LLM:
    """An open model with its engine thread; a context manager. All methods may be called from any thread.

    `ctx`: the most tokens one request may hold (None: the trained length, or what the memory budget allows).
    `draft`: who guesses ahead, a small model, "lookup" (the text itself), or both with a comma between; answers stay
    the same. `draft_max`: guesses at once, at most (None: 7).
    `memory`: bytes for weights, KV cache and scratch together (None: from the machine). `kv_type`: "f32", "f16" or
    "q8_0". `prompt_cache`: a file the prefix cache is loaded from now and saved to on close. `swap_space`: bytes of
    disk for the cache of preempted requests. `partial`: keep only the weights that fit in memory and read the others
    from the file for every token, instead of refusing. `template`: a chat template in place of the file's own.
    `progress(done, total, name)` hears of kernels that must be compiled. `name`: what messages call the model.

    Raises ModelNotFound, GGUFError, UnsupportedModel, BackendUnavailable, MemoryBudgetError, DraftPairError.
    """

    def __init__(
        self,
        path_or_name: str | os.PathLike[str],
        backend: str = "auto",
        ctx: int | None = None,
        draft: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        memory: int | None = None,
        kv_type: str = "f16",
        *,
        draft_max: int | None = None,
        prompt_cache: str | os.PathLike[str] | None = None,
        swap_space: int | None = None,
        template: str | None = None,
        progress: Callable[[int, int, str], None] | None = None,
        max_seqs: int = 64,
        max_waiting: int = 512,
        max_batch_tokens: int = 512,
        prefix_sharing: bool = True,
        partial: bool = False,
        name: str | None = None,
    ):
        from edgellm.opening import Settings, open_engine

        settings = Settings(
            EngineConfig(
                ctx=ctx or 0,
                kv_type=kv_type,
                memory=memory,
                max_batch_tokens=max_batch_tokens,
                max_seqs=max_seqs,
                max_waiting=max_waiting,
                swap_space=swap_space or 0,
                prefix_sharing=prefix_sharing,
            ),
            backend=backend,
            threads=threads,
            draft=os.fspath(draft) if draft is not None else None,
            draft_max=draft_max,
            prompt_cache=Path(prompt_cache) if prompt_cache is not None else None,
            template=template,
            progress=progress,
            partial=partial,
            name=name,
        )
        opened = open_engine(path_or_name, settings)
        self.path: Path | None = opened.path
        self._draft_path = opened.draft_path
        self._huge_pages = opened.huge_pages
        self._set_up(opened.engine, opened.tokenizer, opened.template, opened.on_close)

    @classmethod
    def from_parts(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        runner: Runner,
        tokenizer: Any,
        template: Any = None,
        num_blocks: Sequence[int] | None = None,
    ) -> LLM:
        """An LLM around any `Runner`, such as a scripted one; without a file. `num_blocks` defaults to room for
        `max_seqs` whole contexts."""
        llm = cls.__new__(cls)
        llm.path = llm._huge_pages = None
        whole = -(-config.ctx // config.block_size) * config.max_seqs
        blocks = num_blocks or [whole] * len(model_config.cache_groups)
        llm._set_up(Engine(config, model_config, runner, tokenizer, blocks), tokenizer, template, ())
        return llm

    def _set_up(self, engine: Engine, tokenizer: Any, template: Any, on_close: Sequence[Callable[[], None]]) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.config = engine.model_config
        self.ctx = engine.config.ctx
        self._on_close = tuple(on_close)
        try:
            self._thread = EngineThread(engine)
        except RuntimeError as error:
            engine.close()
            self._give_back()
            raise BackendUnavailable(f"the engine's thread cannot be started: {error}") from None

    def tokenize(self, text: str, special: bool = False, bos: bool | None = None) -> list[int]:
        """Ids of a text. `special`: control tokens written in it count as such; `bos`: None as the model says."""
        return list(self.tokenizer.encode(text, special=special, bos=bos))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out. RequestError for ids outside the vocabulary."""
        ids = self._ids(ids)
        outside = next((i for i in ids if not 0 <= i < self.config.vocab_size), None)
        if outside is not None:
            raise RequestError(f"token {outside} is outside the vocabulary of {self.config.vocab_size}")
        return str(self.tokenizer.decode(ids))

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        on_event: Callable[[TokenEvent], None] | None = None,
        ctx: int | None = None,
        show: Container[int] = (),
    ) -> Stream:
        """Start a request and return its stream of `TokenEvent`s. `on_event` gets the events instead, on the engine
        thread. `ctx`: this request's own limit. `show`: control tokens whose names are part of the text.

        Raises RequestError, ContextLengthError (both numbers), QueueFullError."""
        if not isinstance(params, (SamplingParams, type(None))):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        return self._thread.submit(self._ids(prompt), params, on_event, ctx=ctx, show=show)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Events of one answer as they come. Leaving the loop cancels the request; an error is raised."""
        stream = self.submit(prompt, params)
        try:
            for event in stream:
                if event.error is not None:
                    raise event.error
                yield event
        finally:
            stream.cancel()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer one prompt or several (batched), in order. `params`: for all, or one per prompt."""
        several = _several(prompts)
        if not isinstance(params, (SamplingParams, Sequence, type(None))):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        each = list(params) if isinstance(params, Sequence) else [params] * len(several)
        if len(each) != len(several):
            raise RequestError(f"{len(several)} prompts but {len(each)} SamplingParams")
        streams: list[Stream] = []
        try:
            streams += (self.submit(prompt, p) for prompt, p in zip(several, each, strict=True))
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.cancel()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Completion:
        """Answer a conversation through the model's chat template; `reasoning` and `tool_calls` are told apart from
        the text as the model's family writes them."""
        from edgellm.chat.tools import ReplyStyle, read_reply

        if not messages:
            raise RequestError("at least one message is needed")
        if tools and not self.template.supports_tools:
            raise RequestError("the chat template of this model does not take tools")
        ids = self.template.encode(list(messages), tools=tools)
        style = ReplyStyle(self.template.source, self.tokenizer)
        stream = self.submit(ids, params, show=style.shown)
        try:
            done = stream.result()
        finally:
            stream.cancel()
        text, reasoning, calls = read_reply(done.text, style.parser(ids, tools))
        return replace(done, text=text, reasoning=reasoning, tool_calls=calls)

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of every position, float32 (len(ids), vocab)."""
        return self._rows(ids, Task.LOGITS)

    def embed(self, texts: Prompt | Sequence[Prompt], truncate: bool = True) -> npt.NDArray[np.float32]:
        """One vector of length 1 per text or list of ids, float32 (n, dim), pooled as the model says (decoders: last);
        texts over the context are cut to its first tokens, or refused (ContextLengthError) without `truncate`."""
        rows = [self._ids(text) or [self._filler()] for text in _several(texts)]
        rows = [ids[: self.ctx] if truncate else ids for ids in rows]
        streams: list[Stream] = []
        try:
            streams += (self._thread.submit(ids, SamplingParams(max_tokens=0), task=Task.HIDDEN) for ids in rows)
            vectors = [self._pool(self._collect(stream)) for stream in streams]
        finally:
            for stream in streams:
                stream.cancel()
        return np.stack(vectors) if vectors else np.zeros((0, self.config.dim), np.float32)

    def on_engine(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps and return its result: the way to touch `engine`."""
        return self._thread.call(function)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of this model's engine; of a file also `planned_bytes` (what `edgellm plan` says for one
        conversation of `ctx` tokens; None if the file is gone) beside `peak_bytes`, the most this process has held."""
        stats = self._thread.call(self.engine.stats)
        return stats if self.path is None else {**stats, "planned_bytes": self._planned, "peak_bytes": peak_bytes()}

    @cached_property
    def _planned(self) -> int | None:
        from edgellm.hub import plan

        assert self.path is not None
        try:  # the file again: what is open may have been removed, and runs on
            draft = plan.local_facts(self._draft_path) if self._draft_path else None
            made = plan.make(plan.local_facts(self.path), None, self.ctx, self.engine.config.kv_type, draft)
        except (OSError, EdgeLLMError) as error:
            log.warning("stats without planned_bytes: %s", error)
            return None
        return made.memory.total_bytes

    def settle(self) -> float | None:
        """Do now what a thread does in the seconds after a model was first used: bring the parts of its file that have
        been read into huge pages. For measurements. Returns the share that is in huge pages, where that is known."""
        if self._huge_pages is None:
            return None
        self._huge_pages.settle()
        return self._huge_pages.share()

    def close(self) -> None:
        """Abort what runs and give everything back. Idempotent."""
        self._thread.close()
        self._give_back()

    def _give_back(self) -> None:
        on_close, self._on_close = self._on_close, ()
        for function in on_close:
            function()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenize(prompt, special=True)
        if isinstance(prompt, bytes) or any(isinstance(i, bool) or not isinstance(i, Integral) for i in prompt):
            raise RequestError("a prompt must be a text or a list of token ids (whole numbers)")
        return [int(i) for i in prompt]

    def _filler(self) -> int:
        """What stands for an empty text."""
        candidates = (self.tokenizer.bos_id, self.tokenizer.eos_id, 0)
        return int(next(i for i in candidates if i is not None))

    def _rows(self, ids: Sequence[int], task: Task) -> npt.NDArray[np.float32]:
        return self._collect(self._thread.submit(self._ids(ids), SamplingParams(max_tokens=0), task=task))

    def _collect(self, stream: Stream) -> npt.NDArray[np.float32]:
        try:
            done = stream.result()
        finally:
            stream.cancel()
        if done.finish_reason == "abort":  # its rows are those of a beginning, or none
            raise EdgeLLMError("the model was closed before the text was computed")
        return np.concatenate(stream.rows)

    def _pool(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """(n, dim) -> (dim,), of length 1."""
        how = self.config.pooling or ("last" if self.config.causal else "mean")
        vector = rows.mean(axis=0) if how == "mean" else rows[0] if how == "cls" else rows[-1]
        return np.asarray(vector / max(float(np.linalg.norm(vector)), 1e-12), np.float32)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt (text or ids) or several."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, np.integer))):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def memory_budget(backend: str = "auto") -> int:
    """Bytes that models may take together on this machine when nobody says how many: from its memory, and from the
    limit of the backend's device where it has one."""
    from edgellm.backends import memory_limit
    from edgellm.memory import default_budget

    return default_budget(limit=memory_limit(backend))
