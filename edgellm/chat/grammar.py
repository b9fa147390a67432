"""Grammars as masks over the vocabulary, one matcher per request, made by llguidance from our own tokenizer.

A `GrammarCompiler` belongs to one tokenizer. Each of its methods compiles once (GrammarError with the reason when it
cannot) and returns a factory for `SamplingParams.grammar`, which the engine calls for each request.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from edgellm.chat.closed_schema import closed_schema
from edgellm.chat.json_bounds import BoundTokens, JSONPlace
from edgellm.errors import GrammarError
from edgellm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["GrammarCompiler", "Lead", "TokenGrammar"]

_MAX_SOURCE = 1 << 18
_LEAD_TOKENS = 64
"""More tokens than an opening or closing tag takes."""
# One blank, or a newline and an indent: llama.cpp's bound for JSON.
_JSON_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,20}"}


@dataclass(frozen=True)
class Lead:
    """What may stand before the constrained part: reasoning from `opener` (None: the prompt has opened it already) to
    `closer`, or, without any reasoning, `skip`. All three are texts in which control tokens may be named."""

    closer: str
    opener: str | None = None
    skip: str = ""


class TokenGrammar:
    """One request's matcher: `allowed` before each token, `accept` after it, `roll_back` for rejected drafts.

    `json_behind`: the text is JSON once this Lead is over; None: it is no JSON.
    """

    def __init__(self, matcher: LLMatcher, compiler: GrammarCompiler, json_behind: Lead | None):
        self._matcher = matcher
        self._compiler = compiler
        self._lead = json_behind
        self._data = [b""]
        self._places: list[JSONPlace | None] = [self._place(b"")]

    @property
    def is_done(self) -> bool:
        """Whether the text is complete and nothing but an end token could follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Tokens that may come next, bool (vocab_size,). End tokens are among them once the text may end."""
        import numpy as np

        if self.is_done and not self._matcher.is_error():
            mask = np.zeros(vocab_size, np.bool_)
            mask[self._compiler.end_ids] = True
            return mask
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar failed: {_one_line(self._matcher.get_error())}")
        n = min(vocab_size, self._compiler.vocab_size)
        mask = np.unpackbits(bits, count=n, bitorder="little").view(np.bool_)
        if n < vocab_size:  # rows of the output matrix without a token
            mask = np.concatenate([mask, np.zeros(vocab_size - n, np.bool_)])
        place = self._places[-1]
        return mask if place is None else self._compiler.bounds.limit(mask, place)

    def accept(self, token_id: int) -> bool:
        """Advance by a token. True when nothing but an end token could follow."""
        if not self._matcher.consume_token(token_id):
            raise GrammarError(f"token {token_id} is not what the grammar allows here")
        piece, place = self._compiler.token_bytes(token_id), self._places[-1]
        self._places.append(place.after(piece) if place is not None else self._place(piece))
        return self.is_done

    def roll_back(self, n: int) -> None:
        """Take back the last n accepted tokens."""
        if n:
            self._matcher.rollback(n)
            del self._places[-n:]
            del self._data[max(1, len(self._places)) :]

    def _place(self, piece: bytes) -> JSONPlace | None:
        """Where the JSON stands while the lead may still go on: None until that is over."""
        lead = self._lead
        if lead is None:
            return None
        if piece:
            self._data.append(piece)
        closer, opener = lead.closer.encode(), (lead.opener or "").encode()
        head = b"".join(self._data[:_LEAD_TOKENS])
        if closer and (lead.opener is None or opener.startswith(head.lstrip()[: len(opener)])):
            # Looked for at each token, so it ends in the last ones.
            _, found, rest = b"".join(self._data[-_LEAD_TOKENS:]).partition(closer)
            return JSONPlace().after(rest) if found else None
        return JSONPlace().after(head.removeprefix(lead.skip.encode()))


class GrammarCompiler:
    """Compiles grammars for one tokenizer. The library's view of the vocabulary is built at the first use."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self.vocab_size = tokenizer.vocab_size
        self.token_bytes = tokenizer.token_bytes
        self.end_ids = sorted(tokenizer.eog_ids)
        self.bounds = BoundTokens(tokenizer.vocab_size, tokenizer.token_bytes)

    def json_object(self, lead: Lead | None = None) -> Callable[[], TokenGrammar]:
        """JSON mode: any object."""
        return self.json_schema({"type": "object"}, lead)

    def json_schema(
        self, schema: Mapping[str, Any] | bool | str, lead: Lead | None = None
    ) -> Callable[[], TokenGrammar]:
        """JSON that the schema (an object, or its text) admits; objects that list their properties have no others
        unless it says so."""
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            source = json.dumps(parsed)
            parsed = closed_schema(parsed)
        except RecursionError:
            raise GrammarError("the schema is nested too deeply") from None
        except (ValueError, TypeError) as error:
            raise GrammarError(f"the schema is no JSON: {error}") from error
        if not isinstance(parsed, (Mapping, bool)):
            raise GrammarError("the schema must be a JSON object")
        _check_length(source, "schema")
        if isinstance(parsed, bool):
            parsed = {} if parsed else {"enum": []}
        options = {**_JSON_OPTIONS, **_plain(parsed.get("x-guidance"))}
        body = json.dumps({**parsed, "x-guidance": options})
        return self._compile(f"body: %json {body}\n", lead, "schema", is_json=True)

    def regex(self, pattern: str, lead: Lead | None = None) -> Callable[[], TokenGrammar]:
        """Texts that match a regular expression as a whole (Rust syntax, no look-around)."""
        _check_length(pattern, "pattern")
        escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n")
        return self._compile(f"body: /{escaped}/\n", lead, "pattern")

    def lark(self, text: str, lead: Lead | None = None) -> Callable[[], TokenGrammar]:
        """A grammar in llguidance's Lark dialect (rule `start`) or in llama.cpp's GBNF (rule `root`)."""
        from llguidance.gbnf_to_lark import any_to_lark

        _check_length(text, "grammar")
        try:
            grammar = any_to_lark(text)
        except Exception as error:  # the converter raises several kinds for bad input
            raise GrammarError(f"the grammar does not parse: {_one_line(str(error))}") from error
        if lead is not None:
            grammar = re.sub(r"(?m)^start\b", "body", grammar.replace("%llguidance {}", ""))
            return self._compile(grammar + "\n", lead, "grammar")
        return self._factory(grammar, "grammar")

    def _compile(self, body: str, lead: Lead | None, what: str, is_json: bool = False) -> Callable[[], TokenGrammar]:
        json_behind = (lead or Lead(closer="")) if is_json else None
        if lead is None:
            return self._factory("start: body\n" + body, what, json_behind)
        rules = ["start: lead body" if lead.opener is None else "start: (opener lead | skip) body"]
        rules.append("gap: /( |\\n){0,4}/")
        if lead.opener is not None:
            rules.append(f"opener: gap {self._literals(lead.opener)}")
            rules.append(f"skip: {self._literals(lead.skip)}")
        parts = list(self._tokenizer.split_specials(lead.closer))
        if parts and isinstance(parts[0], str):  # a text: the thought ends at its first occurrence
            rules.append(f"thought[suffix={json.dumps(lead.closer, ensure_ascii=False)}]: /(.|\\n)*/")
            rules.append("lead: thought gap")
        else:
            rules.append(f"lead: /(.|\\n)*/ {self._literals(lead.closer)}")
        return self._factory("\n".join(rules) + "\n" + body, what, json_behind)

    def _literals(self, text: str) -> str:
        """A Lark sequence for a text in which control tokens are named."""
        parts = self._tokenizer.split_specials(text)
        return " ".join(f"<[{p}]>" if isinstance(p, int) else json.dumps(p, ensure_ascii=False) for p in parts) or '""'

    def _factory(self, grammar: str, what: str, json_behind: Lead | None = None) -> Callable[[], TokenGrammar]:
        from llguidance import LLMatcher

        with self._lock:
            library = self._library
        base = LLMatcher(library, grammar, log_level=0)
        if base.is_error():
            raise GrammarError(f"the {what} does not compile: {_reason(base.get_error())}")
        return lambda: TokenGrammar(base.deep_copy(), self, json_behind)

    @cached_property
    def _library(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self.end_ids:
            raise GrammarError("this model has no end token, so no grammar can end")
        view: Any = _Vocabulary(self._tokenizer)
        return LLTokenizer(view, eos_token=self.end_ids)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer):
        ids = range(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eog_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_control(i)]

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, bos=False)


def _check_length(text: str, what: str) -> None:
    if len(text) > _MAX_SOURCE:
        raise GrammarError(f"the {what} has {len(text)} characters; at most {_MAX_SOURCE} are taken")


def _plain(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _reason(text: str) -> str:
    """A compiler's message without the listing of the grammar below it, which is ours for the most part."""
    said = re.split(r"\n +\d+ \| ", text, maxsplit=1)[0]
    return _one_line(re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", said))


def _one_line(text: str) -> str:
    """A message of the library, whose reason may stand in its last line, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:280]} ... {line[-110:]}"
