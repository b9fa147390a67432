"""From a model's template to the parser of its replies: the one door to `formats`, `reply` and `harmony`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from edgellm.chat.formats import ReplyFormat, detect
from edgellm.chat.grammar import Lead
from edgellm.chat.harmony import HARMONY_MARKS, HarmonyParser
from edgellm.chat.reply import Parser, Piece, PlainParser, TagParser
from edgellm.tokenizer import Tokenizer

__all__ = ["Parser", "Piece", "ReplyStyle", "read_reply"]

_TAIL = 64
"""Tokens at the end of a prompt among which an opening tag is looked for."""


class ReplyStyle:
    """How one model's replies are read. One per model; thread-safe.

    style = ReplyStyle(template.source, tokenizer)
    stream = llm.submit(ids, params, show=style.shown)
    parser = style.parser(ids, tools)
    for event in stream:
        pieces = parser.push(event.text)
    pieces = parser.finish()
    """

    def __init__(self, source: str, tokenizer: Tokenizer):
        self.format: ReplyFormat = detect(source)
        self._tokenizer = tokenizer

    @cached_property
    def shown(self) -> frozenset[int]:
        """Control tokens whose names the parser must see: the engine's `show`."""
        if self.format.harmony:
            ids = (self._tokenizer.token_id(mark) for mark in HARMONY_MARKS)
            return frozenset(i for i in ids if i is not None)
        return self.format.shown(self._tokenizer)

    def parser(self, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] | None = None) -> Parser:
        """A parser for one reply to `prompt_ids`. Without `tools` no calls are looked for. Thoughts are told apart
        whether or not the request asked for them: a model that thinks all the same keeps its content clean."""
        form = self.format
        if form.harmony:
            return HarmonyParser(tools or (), self._prompt_tail(prompt_ids))
        if not (form.think or form.noise or (form.syntaxes and tools)):
            return PlainParser()
        return TagParser(form, tools or (), opened=self.opens_thought(prompt_ids))

    def opens_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside a thought that the template opened."""
        if self.format.think is None:
            return False
        opener, closer = self.format.think
        tail = self._prompt_tail(prompt_ids)
        return tail.rfind(opener) > tail.rfind(closer) and not tail.rpartition(opener)[2].strip()

    def lead(self, prompt_ids: Sequence[int], think: bool = True) -> Lead | None:
        """What a grammar must let through before the constrained answer: the thoughts of a model that has them."""
        if self.format.harmony:
            return Lead(
                opener="<|channel|>analysis<|message|>",
                closer="<|end|><|start|>assistant<|channel|>final<|message|>",
                skip="<|channel|>final<|message|>",
            )
        if self.format.think is None:
            return None
        opener, closer = self.format.think
        if self.opens_thought(prompt_ids):
            return Lead(closer=closer)
        return Lead(closer=closer, opener=opener) if think else None

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt_ids[-_TAIL:], special=True)


def read_reply(text: str, parser: Parser) -> tuple[str, str, list[dict[str, Any]]]:
    """A whole reply's content, reasoning and tool calls, these in the form that messages carry them."""
    pieces = [*parser.push(text), *parser.finish()]
    calls = [call for piece in pieces for call in piece.calls]
    shaped = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in calls]
    return "".join(p.content for p in pieces), "".join(p.thinking for p in pieces), shaped
