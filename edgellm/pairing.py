"""Whether a draft model fits its target: token tables entry by entry, special tokens, templates, contexts.

Speculation never changes answers, so a bad pair is only slow; but one whose tokens differ can never help, and is
refused with the first difference.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgellm.chat.template import ChatTemplate
from edgellm.errors import DraftPairError, EdgeLLMError

__all__ = ["Finding", "PairMember", "check_pair", "compare_files"]

log = logging.getLogger(__name__)

PADDING = 512
"""Tables may differ by this many filler entries at the end (sizes of one family differ by rounding)."""

CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "user", "content": "Name a river."},
        {"role": "assistant", "content": "The Rhine."},
        {"role": "user", "content": "Another one?\n\nPlease."},
    ],
)


class PairMember(Protocol):
    """What is compared: an open model file with its tokenizer."""

    @property
    def name(self) -> str:
        """What the user called it."""

    @property
    def gguf(self) -> Any:
        """The open file."""

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""

    @property
    def config(self) -> Any:
        """Its ModelConfig."""


@dataclass(frozen=True)
class Finding:
    """One thing that was compared. `level`: "ok", "warning" or "error" (the pair cannot work)."""

    level: str
    what: str


def compare_files(target: PairMember, draft: PairMember) -> list[Finding]:
    """Everything that can be told without running the models."""
    return [
        *(
            Finding("error", f"{m.name} is an encoder: it writes no text")
            for m in (target, draft)
            if not m.config.causal
        ),
        _tokens(target.tokenizer.tokens, draft.tokenizer.tokens),
        *_special_tokens(target.tokenizer, draft.tokenizer),
        _templates(target, draft),
        _contexts(target.config.context_length, draft.config.context_length),
    ]


def check_pair(findings: Sequence[Finding], target: str, draft: str) -> None:
    """DraftPairError for the first error among the findings; a line in the log for each warning."""
    for finding in findings:
        if finding.level == "error":
            raise DraftPairError(f"{draft} cannot draft for {target}: {finding.what}")
    for finding in findings:
        if finding.level == "warning":
            log.warning("%s as draft for %s: %s", draft, target, finding.what)


def _tokens(target: Sequence[str], draft: Sequence[str]) -> Finding:
    sizes = f"{len(target)} and {len(draft)} tokens"
    for i, (a, b) in enumerate(zip(target, draft, strict=False)):
        if a != b:
            return Finding("error", f"token {i} is {a!r} in the target and {b!r} in the draft ({sizes})")
    if abs(len(target) - len(draft)) > PADDING:
        return Finding("error", f"the token tables have different sizes: {sizes}")
    if len(target) != len(draft):
        return Finding("warning", f"token tables are equal but for their length: {sizes}")
    return Finding("ok", f"token tables are equal: {len(target)} entries")


def _special_tokens(target: Any, draft: Any) -> list[Finding]:
    findings = []
    for name in ("bos_id", "eos_id"):
        a, b = getattr(target, name), getattr(draft, name)
        if a != b:
            findings.append(Finding("error", f"{name} is {a} in the target and {b} in the draft"))
    for name in ("add_bos", "eog_ids"):
        a, b = getattr(target, name), getattr(draft, name)
        if a != b:
            shown = (sorted(x) if isinstance(x, frozenset) else x for x in (a, b))
            findings.append(Finding("warning", "{} is {} in the target and {} in the draft".format(name, *shown)))
    return findings or [Finding("ok", "special tokens are equal")]


def _templates(target: PairMember, draft: PairMember) -> Finding:
    members = {f"the target {target.name}": target, f"the draft {draft.name}": draft}
    templates = {who: ChatTemplate.from_metadata(m.gguf.metadata, m.tokenizer) for who, m in members.items()}
    without = [who for who, template in templates.items() if template.is_fallback]
    if len(without) == len(templates):
        return Finding("ok", "neither model has a chat template")
    if without:
        return Finding("warning", f"{without[0]} has no chat template")
    texts = []
    for who, template in templates.items():
        try:
            texts.append([template.render(list(conversation)) for conversation in CONVERSATIONS])
        except EdgeLLMError as error:
            return Finding("warning", f"the chat template of {who} failed: {error}")
    for i, (a, b) in enumerate(zip(*texts, strict=True)):
        if a != b:
            at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return Finding(
                "warning",
                f"chat templates differ in conversation {i + 1} at character {at}: "
                f"{a[at : at + 20]!r} in the target, {b[at : at + 20]!r} in the draft",
            )
    return Finding("ok", f"chat templates agree on {len(CONVERSATIONS)} conversations")


def _contexts(target: int, draft: int) -> Finding:
    if draft < target:
        return Finding(
            "warning", f"the draft's context ({draft}) is shorter than the target's ({target}): past it, plain"
        )
    return Finding("ok", f"contexts: {target} and {draft} tokens")
