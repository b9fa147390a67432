"""A jinja2 environment for chat templates: transformers' features, and bounds on time, steps, memory and reach.

A template comes with a model file, so from a stranger. The immutable sandbox keeps it from objects; what is added here
keeps it from running on or growing without end: loops and calls are counted, and every operation that can make a long
text from a short one is checked before it runs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgellm.errors import TemplateError

__all__ = ["Sandbox"]

MAX_STEPS = 1_000_000
"""Loop rounds and calls in one rendering."""
MAX_SECONDS = 5.0
MAX_LIST = 1_000_000
_MAX_WIDTH = 10_000
_MAX_BITS = 4096
_PADDING = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs"))


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's words for training; here only a scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Sandbox(ImmutableSandboxedEnvironment):
    """One per template; renderings must not overlap (`ChatTemplate` holds a lock). `start` opens a rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, dump_ascii: Callable[[str], str]):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControls])
        self._dump_ascii = dump_ascii
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters.update(
            tojson=self._tojson,
            join=self._join,
            replace=self._replace,
            center=_bounded_width(FILTERS["center"]),
            indent=_bounded_width(FILTERS["indent"], 100),
            format=lambda text, *args, **kwargs: self._percent(text, kwargs or args),
        )
        self.start(max_chars=1 << 20)

    def start(self, max_chars: int) -> None:
        """Opens a rendering in which no text may become longer than `max_chars`."""
        self._max_chars = max_chars
        self._steps = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> str:
        """Counts one loop round or call."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TemplateError(f"the chat template runs on: more than {MAX_STEPS} steps")
        if self._steps % 64 == 0 and time.monotonic() > self._deadline:
            raise TemplateError(f"the chat template runs on: more than {MAX_SECONDS:g} s")
        return ""

    def check_size(self, size: int) -> None:
        """Raises when a text of `size` characters would be too long."""
        if size > self._max_chars:
            raise TemplateError(f"the chat template makes a text of more than {self._max_chars} characters")

    # -- hooks of jinja2

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        blocks: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for block in blocks:
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(tick, lineno=block.lineno))
        _replace_concats(tree)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, str) and attribute in ("format", "format_map"):
            return lambda *args, **kwargs: self._format(obj, *args, **kwargs)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str) and isinstance(argument, str):
            return self.getattr(obj, argument)
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj == __self.tick:
            return __self.tick()
        __self.tick()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            if name in _PADDING and any(isinstance(a, int) and a > _MAX_WIDTH for a in (*args, *kwargs.values())):
                raise TemplateError(f"the chat template pads a text to more than {_MAX_WIDTH} characters")
            if name == "join" and args:
                return __self._join(args[0], owner)
            if name == "replace" and len(args) >= 2:
                return __self._replace(owner, *args)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            __self.check_size(len(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "%" and isinstance(left, str):
            return self._percent(left, right)
        if operator == "**" and (not numbers or left.bit_length() * max(right, 1) > _MAX_BITS):
            raise TemplateError("the chat template raises a number to too high a power")
        if operator == "*" and numbers and left.bit_length() + right.bit_length() > _MAX_BITS:
            raise TemplateError("the chat template multiplies too large numbers")
        if operator == "*" and not numbers:
            self._check_repeat(left, right)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            self.check_size(len(left) + len(right))
        if operator == "+" and isinstance(left, list) and len(left) > MAX_LIST:
            raise TemplateError(f"the chat template makes a list of more than {MAX_LIST} entries")
        return super().call_binop(context, operator, left, right)

    def _check_repeat(self, left: Any, right: Any) -> None:
        for sequence, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(sequence, str):
                self.check_size(len(sequence) * times)
            if isinstance(times, int) and isinstance(sequence, (list, tuple)) and len(sequence) * times > MAX_LIST:
                raise TemplateError(f"the chat template makes a list of more than {MAX_LIST} entries")

    # -- texts

    def concat(self, parts: Iterable[Any]) -> str:
        """What macros and `{% set %}` blocks join their parts with."""
        texts = [part if isinstance(part, str) else str(part) for part in parts]
        self.check_size(sum(map(len, texts)))
        return "".join(texts)

    def bounded_concat(self, *parts: Any) -> str:
        """The `~` operator."""
        return self.concat(parts)

    def _join(self, values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            values = [self.getitem(value, attribute) for value in values]
        texts = [value if isinstance(value, str) else str(value) for value in values]
        self.check_size(sum(map(len, texts)) + len(separator) * len(texts))
        return str(separator).join(texts)

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        whole, old, new = str(text), str(old), str(new)
        times = whole.count(old) if count is None or count < 0 else min(whole.count(old), count)
        self.check_size(len(whole) + times * max(len(new) - len(old), 0))
        return whole.replace(old, new, -1 if count is None else count)

    def _percent(self, text: str, values: Any) -> str:
        if re.search(r"%[^a-zA-Z%]*(\d{4}|\*)", text):
            raise TemplateError("the chat template formats a number too widely")
        return str(str(text) % values)

    def _format(self, text: str, *args: Any, **kwargs: Any) -> str:
        """`str.format` for plain fields: no attributes, no items, no widths, so nothing to reach through."""
        counter = iter(range(len(args)))

        def field(found: re.Match[str]) -> str:
            name = found.group(1)
            if found.group(0) in ("{{", "}}"):
                return found.group(0)[0]
            if name is None:
                raise SecurityError(f"format field {found.group(0)!r} is not a plain name")
            return str(kwargs[name] if name and not name.isdigit() else args[int(name) if name else next(counter)])

        result = re.sub(r"\{\{|\}\}|\{(\w*)\}|\{[^}]*\}?", field, text)
        self.check_size(len(result))
        return result

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Python's json, in insertion order and not escaped for HTML, as in transformers."""
        if isinstance(indent, int) and indent > 64:
            raise TemplateError("the chat template indents JSON by more than 64 blanks")
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        self.check_size(len(text))
        return self._dump_ascii(text) if ensure_ascii else text


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(f"the chat template refuses these messages: {message}")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(str(form)[:256])


def _bounded_width(function: Callable[..., Any], limit: int = _MAX_WIDTH) -> Callable[..., Any]:
    def bounded(text: Any, width: Any = 80 if limit == _MAX_WIDTH else 4, *args: Any, **kwargs: Any) -> Any:
        if isinstance(width, str):
            width = width[:limit]
        elif width > limit:
            raise TemplateError(f"the chat template asks for a width of more than {limit}")
        return function(str(text), width, *args, **kwargs)

    return bounded


def _replace_concats(node: nodes.Node) -> None:
    """Turns each `a ~ b` into a call of `bounded_concat`, which jinja2 has no hook for."""
    for field, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        for i, child in enumerate(children):
            if not isinstance(child, nodes.Node):
                continue
            _replace_concats(child)
            if isinstance(child, nodes.Concat):
                function = nodes.EnvironmentAttribute("bounded_concat")
                call = nodes.Call(function, child.nodes, [], None, None, lineno=child.lineno)
                if isinstance(value, list):
                    value[i] = call
                else:
                    setattr(node, field, call)
