"""The model's own chat template: messages to the prompt's text and ids."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from edgellm.chat.guard import KNOWN_ROLES, Guard, Markers
from edgellm.chat.messages import normalise
from edgellm.errors import RequestError, TemplateError
from edgellm.tokenizer import Tokenizer

__all__ = ["FALLBACK", "ChatTemplate"]

log = logging.getLogger("edgellm")

FALLBACK = "{% for m in messages %}{{ m.content }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
"""For models without a template: the bare prompt, messages joined by an empty line. No format is made up."""

_KEY = "tokenizer.chat_template"
_MAX_SOURCE = 1 << 20
_MAX_OUTPUT = 8 << 20


class _ShapeError(TemplateError):
    """The template met a value of a kind it did not expect."""


class ChatTemplate:
    """One template of a model. `source`: its jinja text. `is_fallback`: the file has none and `FALLBACK` is used.

    Thread-safe. The template is compiled at the first use, so that a broken one does not stop raw prompts.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        is_fallback: bool = False,
        tools_source: str | None = None,
        model: str = "this model",
    ):
        self.source = source
        self.is_fallback = is_fallback
        self._tokenizer = tokenizer
        self._model = model
        self._with_tools = ChatTemplate(tools_source, tokenizer) if tools_source is not None else None
        self._lock = threading.Lock()
        self._guard: Guard | None = None
        self._told = False

    @classmethod
    def from_metadata(
        cls,
        metadata: Mapping[str, Any],
        tokenizer: Tokenizer,
        name: str = "default",
        source: str | None = None,
        model: str = "this model",
    ) -> ChatTemplate:
        """The template `name` of a GGUF file (`default`, `tool_use`, ...), or the text `source` in its place.

        With `default`, requests that bring tools use the file's `tool_use` template when it has one. `model`: what
        messages call the model.
        """
        if source is not None:
            return cls(source, tokenizer)
        prefix = f"{_KEY}."
        named = {key[len(prefix) :]: text for key, text in metadata.items() if key.startswith(prefix)}
        if isinstance(metadata.get(_KEY), str):
            named["default"] = metadata[_KEY]
        if name in named:
            return cls(str(named[name]), tokenizer, tools_source=named.get("tool_use") if name == "default" else None)
        if name != "default":
            raise TemplateError(f"{model} has no chat template {name!r}; it has: {', '.join(sorted(named)) or 'none'}")
        return cls(FALLBACK, tokenizer, is_fallback=True, model=model)

    @property
    def supports_tools(self) -> bool:
        """Whether the template does anything with tools."""
        return self._with_tools is not None or bool(re.search(r"\btools\b", self.source))

    @property
    def supports_thinking(self) -> bool:
        """Whether the template knows of reasoning before the answer."""
        text = self.source
        tags = "<think>" in text and "</think>" in text
        return tags or bool(
            re.search(
                r"split\(\s*['\"]</think>|enable_thinking|reasoning_effort|<\|channel\|?>|seed:think|</thought>", text
            )
        )

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of the prompt. Only markers that the template writes become control tokens; text of messages, tools and
        `kwargs` never does. BOS comes first if the model adds one and the template does not."""
        if tools and self._with_tools is not None:
            return self._with_tools.encode(messages, tools, add_generation_prompt, **kwargs)
        with self._lock:
            text = self._render(messages, tools, add_generation_prompt, kwargs)
            assert self._guard is not None
            ids = self._tokenizer.encode_guarded(text, self._guard.restore)
        bos = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. Raises TemplateError (the template's own `raise_exception` included) and RequestError.

        `kwargs` are variables of the template (`enable_thinking`, `documents`, ...); `continue_final_message` leaves
        the last message open, to be continued by the model.
        """
        if tools and self._with_tools is not None:
            return self._with_tools.render(messages, tools, add_generation_prompt, **kwargs)
        with self._lock:
            text = self._render(messages, tools, add_generation_prompt, kwargs)
            assert self._guard is not None
            return self._guard.restore(text)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
    ) -> str:
        """The prompt with guarded texts; leaves the guard in `_guard`."""
        if self.is_fallback and not self._told:
            log.warning("%s has no chat template: the messages are its bare prompt, joined by empty lines", self._model)
            self._told = True
        keep_null = bool(re.search(r"is (not )?none|[!=]= none", self.source))
        short_ids = bool(re.search(r"length\s*(!=|==|<)\s*9|length 9", self.source))
        shaped = normalise(messages, keep_null, short_ids)
        if tools and re.search(r"\+\s*message\[['\"]tools['\"]\]", self.source):
            shaped = _tools_in_system(shaped, tools)
        open_end = bool(variables.pop("continue_final_message", False))
        given = {"messages": shaped, "tools": list(tools) if tools else None, **variables}
        try:
            texts = list(_texts(given))
            self._guard = Guard(self._markers, texts, self._roles)
            hidden = {name: self._guard.hide(value) for name, value in given.items()}
        except RecursionError as error:
            raise RequestError("the messages or tools are nested too deeply") from error
        if self._wants_parts:
            for message in hidden["messages"]:
                if isinstance(message.get("content"), str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
        hidden["add_generation_prompt"] = add_generation_prompt and not open_end
        max_chars = _MAX_OUTPUT + 8 * sum(map(len, texts))
        text = self._run_with_arguments(hidden, max_chars)
        return _cut_after_last(text, hidden["messages"]) if open_end else text

    def _run_with_arguments(self, variables: dict[str, Any], max_chars: int) -> str:
        """Templates want tool-call arguments as objects or as JSON text, and a message without content as none or as
        an empty text; those that get what they do not expect fail, and are given the next shape."""
        messages = variables["messages"]
        calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
        objects = [function["arguments"] for function in calls]
        first: _ShapeError | None = None
        for fill, as_text in ((False, False), (False, True), (True, False), (True, True)):
            for function, arguments in zip(calls, objects, strict=True):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
            for message in messages if fill else ():
                message["content"] = message.get("content") or ""
            try:
                return self._run(variables, max_chars)
            except _ShapeError as error:
                first = first or error
            if not calls:
                break
        assert first is not None
        raise first

    def _run(self, variables: dict[str, Any], max_chars: int) -> str:
        from jinja2 import TemplateError as JinjaError
        from jinja2 import UndefinedError

        environment, template = self._compiled
        environment.start(max_chars)
        try:
            size, pieces = 0, []
            for piece in template.generate(**self._token_texts, **variables):
                size += len(piece)
                environment.check_size(size)
                pieces.append(piece)
            return "".join(pieces)
        except TemplateError as error:
            message = str(error) if self._guard is None else self._guard.restore(str(error))
            raise TemplateError(message) from error
        except (TypeError, AttributeError, UndefinedError) as error:
            raise _ShapeError(f"the chat template failed: {str(error) or type(error).__name__}") from error
        except (JinjaError, ArithmeticError, LookupError, ValueError) as error:
            raise TemplateError(f"the chat template failed: {str(error) or type(error).__name__}") from error
        except (RecursionError, MemoryError) as error:
            raise TemplateError(
                "the chat template failed: it calls itself too deeply or needs too much memory"
            ) from error

    @cached_property
    def _compiled(self) -> tuple[Any, Any]:
        """The environment and the compiled template."""
        from jinja2 import TemplateError as JinjaError

        from edgellm.chat.sandbox import Sandbox

        if len(self.source) > _MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(self.source)} characters; at most {_MAX_SOURCE} are read")
        environment = Sandbox(lambda text: self._guard.dump_ascii(text) if self._guard else text)
        try:
            return environment, environment.from_string(self.source)
        except JinjaError as error:
            line = getattr(error, "lineno", None)
            where = f" (line {line})" if line else ""
            raise TemplateError(f"the chat template does not compile: {error}{where}") from error
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise TemplateError(
                f"the chat template does not compile: {type(error).__name__}: nested too deeply"
            ) from error

    @cached_property
    def _markers(self) -> Markers:
        return Markers(self._tokenizer.control_texts)

    @cached_property
    def _roles(self) -> frozenset[str]:
        return KNOWN_ROLES | frozenset(re.findall(r"""['"]([A-Za-z_]+)['"]""", self.source))

    @cached_property
    def _token_texts(self) -> dict[str, str]:
        """`bos_token` and the like, as transformers hands them to templates."""
        tokenizer = self._tokenizer
        ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "unk": tokenizer.unk_id, "pad": tokenizer.pad_id}
        return {f"{name}_token": "" if i is None else tokenizer.tokens[i] for name, i in ids.items()}

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template prints only contents given as lists of parts (some multimodal ones)."""
        if not re.search(r"content", self.source) or "type" not in self.source:
            return False
        probe = "edgellm-probe"
        found = []
        for content in (probe, [{"type": "text", "text": probe}]):
            try:
                message = {"role": "user", "content": content}
                found.append(
                    probe in self._run({"messages": [message], "tools": None, "add_generation_prompt": True}, 1 << 20)
                )
            except TemplateError:
                found.append(False)
        return found == [False, True]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield str(key)
            yield from _texts(entry)
    elif isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        for entry in value:
            yield from _texts(entry)


def _tools_in_system(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Phi-4-mini's template prints no tools but those of a system message, which must be JSON text."""
    functions = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if not messages or messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    return [{**messages[0], "tools": functions}, *messages[1:]]


def _cut_after_last(text: str, messages: list[dict[str, Any]]) -> str:
    """`text` up to the end of the last message's content."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):
        content = content[-1]["text"]
    content = (content or "").strip()
    end = text.rfind(content)
    if not content or end < 0:
        raise TemplateError("the last message cannot be continued: the chat template does not print it as it is")
    return text[: end + len(content)]
