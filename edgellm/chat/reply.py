"""A reply as it streams in, sorted into content, thoughts and tool calls; no letter is lost or doubled.

Rules: a thought begins only at the start of the reply (or was begun by the prompt) and ends at the first closing tag;
blanks next to tags are dropped; a call that cannot be read, or was cut off, comes back as content, marks and all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from edgellm.chat.call_bodies import Call, Tools, is_open_json, json_calls
from edgellm.chat.formats import ReplyFormat, ToolSyntax

__all__ = ["Parser", "Piece", "PlainParser", "TagParser", "find_tag"]

# How a call without marks begins: these keys come first.
_BARE_BEGIN = re.compile(r'\s*\{\s*(\Z|"[a-z]*\Z|"(name|type|parameters|arguments|function|id)")')


@dataclass(frozen=True)
class Piece:
    """A piece of a reply: exactly one of the three is set. `calls`: (name, arguments) pairs."""

    content: str = ""
    thinking: str = ""
    calls: tuple[Call, ...] = ()


class Parser(Protocol):
    """Fed with text in any pieces; `finish` gives what was held back. `cut`: the end came inside a thought or call."""

    cut: bool

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


class PlainParser:
    """For replies without markup: all text is content."""

    cut = False

    def push(self, text: str) -> list[Piece]:
        """The text itself."""
        return [Piece(content=text)] if text else []

    def finish(self) -> list[Piece]:
        """Nothing: no text is held back."""
        return []


class TagParser:
    """For families that mark thoughts and calls with tags. `opened`: the prompt ended inside a thought."""

    def __init__(self, form: ReplyFormat, tools: Tools = (), opened: bool = False):
        self._tools = tools
        self._names = {str(tool.get("function", tool).get("name")) for tool in tools}
        self._syntaxes = form.syntaxes if tools else ()
        self._bare = any(syntax.bare for syntax in self._syntaxes)
        self._noise = form.noise
        self._think = form.think
        self._syntax: ToolSyntax | None = None
        self._buffer = ""
        self._out: list[Piece] = []
        self._state = self._thought if opened and self._think else self._start
        self._strip = opened
        self._called = False
        self.cut = False

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._buffer += text
        self._run(final=False)
        return self._take()

    def finish(self) -> list[Piece]:
        """What was held back."""
        self._run(final=True)
        self.cut = self._syntax is not None or self._state == self._thought
        if self._syntax is not None:
            self._emit(content=self._syntax.opener + self._buffer)
        elif self._state == self._thought:
            self._emit(thinking=self._buffer)
        else:
            self._emit(content=self._buffer.rstrip() if self._called else self._buffer)
        self._buffer = ""
        return self._take()

    def _run(self, final: bool) -> None:
        """Lets states work until one needs more text (returns False)."""
        while self._state(final):
            pass

    # -- states: each looks at the buffer, emits, and returns whether another state may go on

    def _start(self, final: bool) -> bool:
        """Before the first letter: a thought, a bare call, or content."""
        text = self._buffer.lstrip()
        opener = self._think[0] if self._think else ""
        if opener and text.startswith(opener):
            self._buffer, self._state, self._strip = text[len(opener) :], self._thought, True
            return True
        if opener and opener.startswith(text) and not final:
            return False
        self._state = self._begin_content
        return True

    def _thought(self, final: bool) -> bool:
        assert self._think is not None
        if self._strip:
            self._buffer = self._buffer.lstrip()
            self._strip = not self._buffer
        at, tag = find_tag(self._buffer, (self._think[1],))
        if tag:
            self._emit(thinking=self._buffer[:at].rstrip())
            self._buffer, self._state = self._buffer[at + len(tag) :].lstrip(), self._begin_content
            self._strip = True
            return True
        at = len(self._buffer[:at].rstrip())  # blanks before the tag are dropped with it
        self._emit(thinking=self._buffer[:at])
        self._buffer = self._buffer[at:]
        return False

    def _begin_content(self, final: bool) -> bool:
        """Where blanks behind a thought are dropped and where a bare call may stand."""
        text = self._buffer.lstrip()
        if self._strip:
            self._buffer = text
        if not text and not final and (self._strip or self._bare):
            return False
        if self._bare and text.startswith("{"):
            self._state = self._bare_call
            return True
        self._strip, self._state = False, self._content
        return True

    def _bare_call(self, final: bool) -> bool:
        """A reply that begins like a call without marks is held to its end, to see whether a known tool is called."""
        if not final and _BARE_BEGIN.match(self._buffer):
            return False
        calls = json_calls(self._buffer, self._tools) if final else None
        if calls and all(name in self._names for name, _ in calls):
            self._emit(calls=tuple(calls))
            self._buffer = ""
            return False
        self._state = self._content
        return True

    def _content(self, final: bool) -> bool:
        tags = (*(syntax.opener for syntax in self._syntaxes), *self._noise)
        at, tag = find_tag(self._buffer, tags)
        text = self._buffer[:at]
        if self._syntaxes and (tag or not final):
            kept = text.rstrip()  # blanks around calls are dropped, so they wait for what follows
            if tag:
                text = kept
            else:
                at, text = len(kept), kept
        self._emit(content=text)
        if not tag:
            self._buffer = self._buffer[at:]
            return False
        self._buffer = self._buffer[at + len(tag) :]
        if tag not in self._noise:
            self._syntax = next(syntax for syntax in self._syntaxes if syntax.opener == tag)
            self._state = self._call
        return True

    def _call(self, final: bool) -> bool:
        assert self._syntax is not None
        end = self._closer(self._syntax, final)
        if end < 0 and not final:
            return False
        closer = self._syntax.closer if end >= 0 else ""
        body = self._buffer[:end] if closer else self._buffer
        whole = bool(closer) or self._syntax.in_json or not self._syntax.closer
        calls = self._syntax.read(body, self._tools) if whole else None
        if calls is None and not closer:
            return False  # cut off: `finish` gives it back
        if calls is None:
            self._emit(content=self._syntax.opener + body + closer)
        else:
            self._emit(calls=tuple(calls))
            self._strip = self._called = True
        self._buffer = self._buffer[len(body) + len(closer) :]
        self._syntax, self._state = None, self._begin_content
        return True

    def _closer(self, syntax: ToolSyntax, final: bool) -> int:
        """Where the closing mark stands, -1 if not yet. One inside a JSON string counts only if no other comes."""
        first = at = self._buffer.find(syntax.closer) if syntax.closer else -1
        while at >= 0 and syntax.in_json and is_open_json(self._buffer[:at]):
            at = self._buffer.find(syntax.closer, at + 1)
        return first if final and at < 0 else at

    # -- output

    def _emit(self, content: str = "", thinking: str = "", calls: Iterable[Call] = ()) -> None:
        calls = tuple(calls)
        if content or thinking or calls:
            self._out.append(Piece(content, thinking, calls))

    def _take(self) -> list[Piece]:
        out, self._out = self._out, []
        return out


def find_tag(text: str, tags: Iterable[str]) -> tuple[int, str]:
    """Where the first of `tags` stands, and which; else where text that may begin one starts (its end if none)."""
    best, found = len(text), ""
    for tag in tags:
        at = text.find(tag)
        if at >= 0 and (at < best or (at == best and len(tag) > len(found))):
            best, found = at, tag
    if found:
        return best, found
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), 0, -1):
            if text.endswith(tag[:size]):
                best = min(best, len(text) - size)
                break
    return best, ""
