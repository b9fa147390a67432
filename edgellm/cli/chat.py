"""`edgellm chat`: a conversation in the terminal. When stdin is no terminal it is one prompt, answered once."""

from __future__ import annotations

import sys

import click

from edgellm.cli.opening import LONGEST_PROMPT, model_path, note, open_session, read_stdin
from edgellm.cli.options import (
    ModelFlags,
    SamplingFlags,
    Text,
    local_option,
    model_options,
    sampling_options,
    stats_option,
)

__all__ = ["chat"]


@click.command()
@click.argument("model", default="demo")
@click.option("--system", type=Text(), help="System message.")
@click.option("--truncate", is_flag=True, help="Drop oldest turns when the context is full, without asking.")
@sampling_options
@model_options
@local_option
@stats_option
def chat(
    model: str,
    system: str | None,
    truncate: bool,
    sampling: SamplingFlags,
    model_flags: ModelFlags,
    local: bool,
    stats: bool,
) -> None:
    """Talk with MODEL (default: demo). /help lists the commands inside; Ctrl-D leaves."""
    from edgellm.cli.run import answer_once

    if not sys.stdin.isatty():
        text = read_stdin(LONGEST_PROMPT)
        if not text.strip():
            model_path(model)
            return
        with open_session(model, model_flags, local=local) as session:
            options = {**session.defaults, **sampling.given()}
            answer_once(session, text, options, system=system, truncate=truncate, stats=stats)
        return
    with open_session(model, model_flags, local=local) as session:
        from edgellm.cli.prompt import make_reader
        from edgellm.cli.repl import Conversation, Repl
        from edgellm.config import home

        note(f"{session.name} is ready. /help lists the commands, Ctrl-D leaves.")
        conversation = Conversation(
            system=session.system if system is None else system,
            turns=list(session.opening),
            sampling={**session.defaults, **sampling.given()},
            stats=stats,
        )
        Repl(session, make_reader(home() / "history"), conversation, truncate).loop()
