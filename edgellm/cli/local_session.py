"""A session on a model that this process loads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from edgellm.cli.opening import note, open_llm
from edgellm.cli.options import ModelFlags
from edgellm.cli.session import Answer, Message
from edgellm.config import SamplingParams

if TYPE_CHECKING:
    from edgellm.engine.engine import Stream
    from edgellm.llm import LLM

__all__ = ["LocalReply", "LocalSession"]


class LocalReply:
    """A running request of the engine in this process."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self._started = time.perf_counter()
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._times: list[float] = []
        self.answer = Answer(text="", finish_reason="abort")

    def __iter__(self) -> Iterator[str]:
        for event in self._stream:
            if event.ids:
                self._times.append(time.perf_counter())
                self._ids.extend(event.ids)
            self._pieces.append(event.text)
            if event.error is not None:
                raise event.error
            if event.finish_reason is not None:
                self._finish(event.finish_reason, event.completion)
            if event.text:
                yield event.text

    def cancel(self) -> None:
        """Stop the request; the part that came stays in `answer`."""
        self._stream.cancel()
        self._finish("abort", None)

    def _finish(self, reason: str, completion: Any) -> None:
        times, n = self._times, len(self._ids)
        self.answer = Answer(
            text="".join(self._pieces),
            finish_reason=reason,
            ids=list(self._ids),
            prompt_tokens=completion.prompt_tokens if completion else 0,
            cached_tokens=completion.cached_tokens if completion else 0,
            new_tokens=n,
            ttft_s=times[0] - self._started if times else None,
            tpot_s=(times[-1] - times[0]) / (n - 1) if n > 1 else None,
            speculation=completion.timings.get("speculation") if completion else None,
        )


class LocalSession:
    """A model loaded here. Says on stderr when its file has no chat template."""

    def __init__(self, name: str, flags: ModelFlags):
        self.name = name
        self.defaults: dict[str, Any] = {}
        started = time.perf_counter()
        self.llm: LLM = open_llm(name, flags)
        self.load_s = time.perf_counter() - started
        self._told = False

    def reply(self, messages: list[Message], sampling: dict[str, Any], truncate: bool = False) -> LocalReply:
        """Answer the conversation; see `Session.reply`."""
        if self.llm.template.is_fallback and not self._told:
            note(f"{self.name} has no chat template: plain `User:` and `Assistant:` lines are used (--raw: none)")
            self._told = True
        return LocalReply(self.llm.submit(self.llm.template.encode(messages), SamplingParams(**sampling)))

    def continue_text(self, prompt: str, sampling: dict[str, Any]) -> LocalReply:
        """Go on with `prompt` as it stands."""
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
