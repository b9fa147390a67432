"""A stand-in for `LLM` that says given pieces of text, one per step, from a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgellm.config import SamplingParams


class ByteTokenizer:
    """One token per UTF-8 byte, after BOS 256; 257 ends a text."""

    vocab_size, bos_id, eos_id, add_bos = 258, 256, 257, False

    def encode(self, text: str, special: bool = False, bos: bool | None = None) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def is_control(self, token: int) -> bool:
        return token >= 256


class PlainTemplate:
    supports_tools = supports_thinking = False
    is_fallback = False
    source = "{{ messages }}"

    def encode(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any) -> list[int]:
        return list("".join(f"{m['role']}: {m['content']}\n" for m in messages).encode())


@dataclass
class FakeLLM:
    pieces: Sequence[str] = ("Hel", "lo")
    delay: float = 0.0
    ctx: int = 512
    error: Exception | None = None
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    cancelled: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.template = PlainTemplate()
        self.config = SimpleNamespace(context_length=512, arch="fake")

    def stats(self) -> dict[str, Any]:
        return {"running": 0, "waiting": 0, "cache_groups": []}

    def close(self) -> None:
        self.closed = True

    def embed(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        return np.array([[len(row) + 1.0, 2.0, 3.0, 4.0] for row in rows], np.float32)

    def submit(self, prompt: Sequence[int], params: SamplingParams, on_event: Callable[[Any], None]) -> Any:
        self.prompts.append(list(prompt))
        self.params.append(params)
        stream = SimpleNamespace(stopped=False)

        def cancel() -> None:
            self.cancelled += 1
            stream.stopped = True

        stream.cancel = cancel
        threading.Thread(target=self._say, args=(stream, list(prompt), params, on_event), daemon=True).start()
        return stream

    def _say(self, stream: Any, prompt: list[int], params: SamplingParams, on_event: Callable[[Any], None]) -> None:
        ids: list[int] = []
        for number, piece in enumerate(self.pieces):
            if len(ids) >= params.max_tokens or stream.stopped:
                break
            time.sleep(self.delay)
            ids.append(number)
            on_event(event(piece, (number,)))
        reason = "abort" if stream.stopped else "stop" if len(ids) == len(self.pieces) else "length"
        if self.error is not None:
            on_event(event("", (), "error", error=self.error))
            return
        completion = SimpleNamespace(ids=ids, prompt_tokens=len(prompt), cached_tokens=0, timings={"prefill_s": 0.5})
        on_event(event("", (), reason, completion))


def event(text: str, ids: tuple[int, ...], reason: str | None = None, completion: Any = None, error: Any = None) -> Any:
    return SimpleNamespace(text=text, ids=ids, logprobs=None, finish_reason=reason, completion=completion, error=error)
