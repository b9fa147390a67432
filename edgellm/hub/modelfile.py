"""Modelfiles: the text that describes a model made from another (`edgellm create NAME -f Modelfile`).

FROM demo                          a stored name, `demo`, or a path (seen from the Modelfile) to a .gguf file
PARAMETER temperature 0.2          an option; `stop` may repeat
SYSTEM "You are terse."            also in three quotes over several lines
TEMPLATE \"\"\"...\"\"\"                 a Jinja template (Ollama's Go templates are refused in words)
MESSAGE user Hello                 a turn that is there from the start
LICENSE \"\"\"...\"\"\"
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from edgellm.errors import RequestError, TemplateError, UnsupportedModel

__all__ = ["ROLES", "Modelfile", "check_template", "format_modelfile", "parse_modelfile"]

_INTS = {"num_ctx", "num_predict", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "top_k", "seed"}
_INTS |= {"repeat_last_n", "mirostat", "draft_num_predict"}
_FLOATS = {"temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty"}
_FLOATS |= {"mirostat_tau", "mirostat_eta", "tfs_z"}
_BOOLS = {"numa", "use_mmap", "use_mlock", "low_vram", "penalize_newline", "vocab_only", "logits_all", "f16_kv"}
_LARGEST = 4 << 20
ROLES = ("system", "user", "assistant")
"""Whose a stored turn can be."""


@dataclass
class Modelfile:
    """What a Modelfile says. `notes`: what was read but has no effect here, one line each."""

    source: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    template: str | None = None
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    license: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def parse_modelfile(text: str) -> Modelfile:
    """Reads a Modelfile. Raises RequestError with the line, UnsupportedModel for an ADAPTER."""
    if len(text) > _LARGEST:
        raise RequestError("the Modelfile has more than 4 MiB")
    found = Modelfile()
    for line, word, value in _instructions(text):
        _apply(found, line, word.upper(), value)
    if not found.source:
        raise RequestError("the Modelfile has no FROM line")
    check_template(found.template)
    return found


def _apply(found: Modelfile, line: int, word: str, value: str) -> None:
    if word == "FROM":
        if found.source:
            raise RequestError(f"line {line} of the Modelfile: a second FROM; split files are found from the first one")
        found.source = value
    elif word == "PARAMETER":
        name, rest = _first_word(value)
        _add_param(found.params, name.lower(), _unquoted(rest), f"line {line} of the Modelfile")
    elif word == "SYSTEM":
        found.system = value
    elif word == "TEMPLATE":
        found.template = value
    elif word == "LICENSE":
        found.license.append(value)
    elif word == "MESSAGE":
        role, content = _first_word(value)
        if role.lower() not in ROLES:
            raise RequestError(f"line {line} of the Modelfile: the role must be system, user or assistant")
        found.messages.append({"role": role.lower(), "content": _unquoted(content)})
    elif word == "ADAPTER":
        raise UnsupportedModel(
            "LoRA adapters (ADAPTER) cannot be applied by edgellm; merge the adapter into the model first "
            "(llama.cpp's llama-export-lora writes a merged .gguf) and use that file in FROM"
        )
    elif word in ("REQUIRES", "RENDERER", "PARSER"):
        found.notes.append(f"{word} is Ollama's own and has no effect in edgellm")
    else:
        raise RequestError(
            f"line {line} of the Modelfile: {ascii(word)[:40]} is no instruction; known are FROM, PARAMETER, SYSTEM, "
            "TEMPLATE, MESSAGE, LICENSE"
        )


def _add_param(params: dict[str, Any], name: str, text: str, where: str) -> None:
    try:
        if name == "stop":
            params.setdefault("stop", []).append(text)
        elif name in _INTS:
            params[name] = int(float(text)) if re.fullmatch(r"-?\d+\.0*", text) else int(text)
        elif name in _FLOATS:
            params[name] = float(text)
            if not -1e9 < params[name] < 1e9:
                raise ValueError
        elif name in _BOOLS:
            params[name] = {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        else:
            known = ", ".join(sorted(_INTS | _FLOATS | {"stop"}))
            raise RequestError(f"{where}: unknown parameter {ascii(name)[:60]}; known are {known}")
    except (ValueError, KeyError):
        raise RequestError(f"{where}: {ascii(text)[:60]} is no value for {name}") from None


def check_template(template: str | None) -> None:
    """Refuses Go templates and Jinja that does not parse (TemplateError)."""
    if template is None:
        return
    if re.search(r"\{\{-?\s*(if|range|end|else|with|define|block|template)?\s*[.$]", template):
        raise TemplateError(
            "TEMPLATE is a Go template, as Ollama uses; edgellm takes Jinja: leave TEMPLATE out to use the model's own"
        )
    import jinja2

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"TEMPLATE does not parse: line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise TemplateError("TEMPLATE is nested too deep") from None


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line number, instruction, value); values in three quotes may span lines."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    i = 0
    while i < len(lines):
        start, stripped = i + 1, lines[i].strip()
        i += 1
        if not stripped or stripped.startswith("#"):
            continue
        word, rest = _first_word(stripped)
        before, quotes, body = rest.partition('"""')
        if quotes and (not before or word.upper() in ("PARAMETER", "MESSAGE")):
            body = lines[i - 1].partition('"""')[2]
            while '"""' not in body:
                if i >= len(lines):
                    raise RequestError(f'line {start} of the Modelfile: """ without an end')
                body += "\n" + lines[i]
                i += 1
            content, _, rest = body.partition('"""')
            content += '"' * (len(rest) - len(rest.lstrip('"')))  # the last three of a run of quotes are the end
            yield start, word, before + (content if not before else f'"""{content}"""')
            continue
        if not rest:
            raise RequestError(f"line {start} of the Modelfile: {ascii(word)[:40]} without a value")
        yield start, word, _unquoted(rest)


def format_modelfile(model: Modelfile) -> str:
    """The text that `parse_modelfile` reads as `model`, without its notes and with "\n" at the end of lines. The format
    has no way to write three quotes within a text: a comment stands in such a text's place."""
    lines = [f"FROM {model.source}"]
    for name, value in model.params.items():
        lines += [_line(f"PARAMETER {name}", item) for item in (value if isinstance(value, list) else [value])]
    for word, text in (("TEMPLATE", model.template), ("SYSTEM", model.system)):
        lines += [] if text is None else [_line(word, text)]
    lines += [_line("LICENSE", text) for text in model.license]
    lines += [_line(f"MESSAGE {message['role']}", message["content"]) for message in model.messages]
    return "\n".join(lines) + "\n"


def _first_word(text: str) -> tuple[str, str]:
    word, *rest = text.split(None, 1)
    return word, rest[0].strip() if rest else ""


def _line(words: str, value: Any) -> str:
    if not isinstance(value, str):
        return f"{words} {value}"
    if "\n" not in value and '"""' not in f'"{value}"':
        return f'{words} "{value}"'
    if '"""' in value.rstrip('"'):
        return f"# {words}: left out, its text has three quotes in it"
    return f'{words} """{value}"""'


def _unquoted(text: str) -> str:
    if len(text) >= 6 and text.startswith('"""') and text.endswith('"""'):
        return text[3:-3]
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] == '"' else text
