"""The REPL's slash commands. A message of one line that begins with `/` is a command and is never sent on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellm.config import SamplingParams, home
from edgellm.errors import EdgeLLMError, RequestError, StoreError

if TYPE_CHECKING:
    from edgellm.cli.repl import Repl

__all__ = ["is_command", "run_command"]

_SWITCHES = {"on": True, "off": False}
_SETTABLE = {f.name for f in fields(SamplingParams)} - {"logit_bias", "logprobs", "grammar", "ignore_eos"}

HELP = '''\
/set NAME VALUE   set temperature, top_k, top_p, min_p, seed, max_tokens, repeat_penalty, stop, ...
/set render off   show answers as plain text; /set stats on: the speed after each answer
/set              show all settings
/show             show the model
/system [TEXT]    set the system message (no TEXT: show it)
/clear            forget the conversation, keep the system message
/save NAME        keep this conversation; /load NAME brings it back
/bye              leave (also Ctrl-D)

"""               begins a message of several lines, and ends it; Alt-Enter starts a new line
Ctrl-C            stops an answer'''


def is_command(text: str) -> bool:
    """Whether `text` is meant for the REPL: one line that begins with `/`."""
    line = text.strip()
    return line.startswith("/") and "\n" not in line


def run_command(repl: Repl, text: str) -> bool:
    """Do what a `/` line says; False: leave the REPL. What goes wrong is printed, the REPL goes on."""
    name, _, rest = text.strip().partition(" ")
    if name in ("/bye", "/exit", "/quit"):
        return False
    command = _COMMANDS.get(name)
    try:
        if command is None:
            click.echo(f'{name} is no command, so nothing was sent (put """ around a message that begins with /)')
            click.echo(HELP)
        else:
            command(repl, rest.strip())
    except (EdgeLLMError, OSError) as error:
        click.echo(f"edgellm: {error}", err=True)
    return True


def _help(repl: Repl, rest: str) -> None:
    click.echo(HELP)


def _set(repl: Repl, rest: str) -> None:
    chat = repl.conversation
    name, _, value = rest.partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    if not name:
        params = SamplingParams(**chat.sampling)
        for key in sorted(_SETTABLE):
            click.echo(f"{key:<18} {getattr(params, key)}")
        click.echo(f"{'render':<18} {chat.render}\n{'stats':<18} {chat.stats}")
    elif name in ("render", "stats"):
        if value not in _SWITCHES:
            raise RequestError(f"/set {name} takes on or off, not {value!r}")
        setattr(chat, name, _SWITCHES[value])
    elif name == "system":
        _system(repl, value)
    elif name not in _SETTABLE:
        raise RequestError(f"no setting is called {name!r}; /set shows all")
    else:
        changed = {**chat.sampling, name: _value(name, value)}
        SamplingParams(**changed)
        chat.sampling = changed


def _value(name: str, text: str) -> Any:
    if name == "stop":
        return (text,) if text else ()
    if name == "seed" and text in ("", "none"):
        return None
    kind: Callable[[str], Any] = float if isinstance(getattr(SamplingParams(), name), float) else int
    try:
        return kind(text)
    except ValueError:
        raise RequestError(f"{name} must be a number, not {text!r}") from None


def _show(repl: Repl, rest: str) -> None:
    for key, value in repl.session.facts().items():
        click.echo(f"{key:<18} {value}")


def _system(repl: Repl, rest: str) -> None:
    if not rest:
        click.echo(repl.conversation.system if repl.conversation.system is not None else "(none)")
    else:
        repl.conversation.system = rest.removeprefix('"').removesuffix('"') if rest.startswith('"') else rest


def _clear(repl: Repl, rest: str) -> None:
    repl.conversation.turns.clear()
    click.echo("The conversation is empty.")


def _chat_file(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
        raise RequestError("a conversation's name has 1 to 64 letters, digits, dots, dashes and underscores")
    return home() / "chats" / f"{name}.json"


def _save(repl: Repl, rest: str) -> None:
    path, chat = _chat_file(rest), repl.conversation
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = {"model": repl.session.name, "system": chat.system, "sampling": chat.sampling, "turns": chat.turns}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(saved, ensure_ascii=False, indent=1), encoding="utf-8")
    partial.replace(path)
    click.echo(f"Saved {len(chat.turns)} messages; /load {rest} brings them back.")


def _load(repl: Repl, rest: str) -> None:
    path = _chat_file(rest)
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.json"))) or "none"
        raise StoreError(f"no conversation is called {rest}; saved ones: {known}")
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        turns = [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in saved["turns"]]
        system, sampling = saved["system"], dict(saved["sampling"])
        SamplingParams(**sampling)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged ({type(error).__name__}: {error}); delete it") from error
    chat = repl.conversation
    chat.system, chat.turns, chat.sampling = None if system is None else str(system), turns, sampling
    if saved.get("model") != repl.session.name:
        click.echo(f"It was held with {saved.get('model')}; {repl.session.name} goes on with it.")
    click.echo(f"Loaded {len(turns)} messages.")


_COMMANDS: dict[str, Callable[[Repl, str], None]] = {
    "/help": _help,
    "/?": _help,
    "/set": _set,
    "/show": _show,
    "/system": _system,
    "/clear": _clear,
    "/save": _save,
    "/load": _load,
}
