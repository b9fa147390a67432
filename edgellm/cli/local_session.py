"""A session on a model that this process loads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgellm.cli.opening import open_llm, stored_model
from edgellm.cli.options import ModelFlags
from edgellm.cli.session import Answer, Message
from edgellm.config import SamplingParams

if TYPE_CHECKING:
    from edgellm.hub.store import StoredModel
    from edgellm.llm import LLM, Completion, Stream

__all__ = ["LocalReply", "LocalSession"]


class LocalReply:
    """A running request of the engine in this process."""

    def __init__(self, stream: Stream, truncated: dict[str, int] | None = None):
        self._stream = stream
        self._truncated = truncated
        self._pieces: list[str] = []
        self.answer = Answer("", "abort")

    def __iter__(self) -> Iterator[str]:
        for event in self._stream:
            self._pieces.append(event.text)
            if event.error is not None:
                raise event.error
            if event.text:
                yield event.text
            if event.finish_reason is not None:
                self._finish(event.finish_reason, event.completion)

    def cancel(self) -> None:
        """Stop the request; the part that came stays in `answer`."""
        self._stream.cancel()
        self.answer = Answer("".join(self._pieces), "abort", truncated=self._truncated)

    def _finish(self, reason: str, completion: Completion | None) -> None:
        if completion is None:
            self.answer = Answer("".join(self._pieces), reason, truncated=self._truncated)
            return
        self.answer = Answer(
            text=completion.text,
            finish_reason=reason,
            ids=list(completion.ids),
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            new_tokens=len(completion.ids),
            ttft_s=completion.timings.get("ttft_s"),
            tpot_s=completion.timings.get("tpot_s"),
            speculation=completion.timings.get("speculation"),
            truncated=self._truncated,
        )


class LocalSession:
    """A model loaded here."""

    def __init__(self, name: str, flags: ModelFlags):
        self.name = name
        started = time.perf_counter()
        stored = stored_model(name)
        self.defaults: dict[str, Any] = {}
        self.system = stored.system if stored else None
        self.opening: list[Message] = [dict(message) for message in stored.messages] if stored else []
        template = None
        if stored:
            template = stored.template
            flags = self._with_stored(flags, stored)
        self.llm: LLM = open_llm(name, flags, template)
        self.load_s = time.perf_counter() - started

    def _with_stored(self, flags: ModelFlags, stored: StoredModel) -> ModelFlags:
        """The stored model's own parameters become defaults; what was given on the command line wins."""
        if stored.params:
            from edgellm.server.options import parse_options

            options = parse_options(stored.params, source=self.name)
            self.defaults = dict(options.sampling)
            flags = replace(flags, ctx=flags.ctx or options.num_ctx)
        if stored.draft is not None and flags.draft is None:
            flags = replace(flags, draft=str(stored.draft))
        return flags

    def reply(self, messages: list[Message], sampling: dict[str, Any], truncate: bool = False) -> LocalReply:
        """Answer the conversation; see `Session.reply`."""
        ids = self.llm.template.encode(messages)
        dropped = None
        if truncate and len(ids) >= self.llm.ctx:
            from edgellm.server.truncate import fit_turns

            kept = fit_turns(messages, lambda turns: len(self.llm.template.encode(turns)) < self.llm.ctx)
            if kept is not None:
                whole, ids = len(ids), self.llm.template.encode(kept)
                dropped = {"messages": len(messages) - len(kept), "tokens": whole - len(ids)}
        return LocalReply(self.llm.submit(ids, SamplingParams(**sampling)), dropped)

    def continue_text(self, prompt: str, sampling: dict[str, Any]) -> LocalReply:
        """Go on with `prompt` as it stands; control tokens written in it count as such."""
        return LocalReply(self.llm.submit(prompt, SamplingParams(**sampling)))

    def facts(self) -> dict[str, str]:
        """What `/show` prints."""
        config = self.llm.config
        return {
            "file": str(self.llm.path),
            "architecture": config.arch,
            "layers": str(config.n_layers),
            "trained context": f"{config.context_length:,}",
            "vocabulary": f"{config.vocab_size:,}",
            "chat template": "none in the file" if self.llm.template.is_fallback else "the model's own",
        }

    def close(self) -> None:
        """Give back the engine and the backend's threads."""
        self.llm.close()
