"""`edgellm run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from edgellm.cli.opening import LONGEST_PROMPT, read_stdin
from edgellm.cli.options import (
    ModelFlags,
    SamplingFlags,
    Text,
    json_option,
    local_option,
    model_options,
    sampling_options,
    stats_option,
)
from edgellm.cli.session import Answer, Message, Reply, Session, dropped_line, stats_line

__all__ = ["answer_once", "run"]


@click.command()
@click.argument("model")
@click.argument("prompt", type=Text(), required=False)
@click.option("--system", type=Text(), help="System message.")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it stands, without the chat template.")
@click.option("--truncate", is_flag=True, help="Drop oldest turns when the prompt is too long, instead of an error.")
@sampling_options
@model_options
@local_option
@stats_option
@json_option
@click.pass_context
def run(
    ctx: click.Context,
    model: str,
    prompt: str | None,
    system: str | None,
    raw: bool,
    truncate: bool,
    sampling: SamplingFlags,
    model_flags: ModelFlags,
    local: bool,
    stats: bool,
    as_json: bool,
) -> None:
    """Answer PROMPT (default: stdin, when it is no terminal) and exit. --json and --raw load the model in this process
    also when a server has it."""
    if prompt is None and sys.stdin.isatty():
        if as_json or raw:
            raise click.UsageError("--json and --raw need a PROMPT, or text on stdin")
        from edgellm.cli.chat import chat

        session_flags = {"sampling": sampling, "model_flags": model_flags, "local": local, "stats": stats}
        ctx.invoke(chat, model=model, system=system, truncate=truncate, **session_flags)
        return
    if raw and system is not None:
        raise click.UsageError("--raw leaves out the chat template, so there is no place for --system")
    text = read_stdin(LONGEST_PROMPT) if prompt is None else prompt
    from edgellm.cli.opening import open_session

    with open_session(model, model_flags, local=local or raw or as_json) as session:
        options = {**session.defaults, **sampling.given()}
        how = {"raw": raw, "truncate": truncate, "quiet": as_json, "stats": stats}
        answer = answer_once(session, text, options, system=system, **how)
        if as_json:
            click.echo(json.dumps(_json(answer, session)))


def answer_once(
    session: Session,
    text: str,
    options: dict[str, Any],
    *,
    system: str | None = None,
    raw: bool = False,
    truncate: bool = False,
    quiet: bool = False,
    stats: bool = False,
) -> Answer:
    """Send one prompt and write the answer to stdout as it comes (unless `quiet`), then to stderr what was dropped of
    the stored model's turns and the `stats`; a Ctrl-C stops the model first."""
    if raw:
        reply = session.continue_text(text, options)
    else:
        system = session.system if system is None else system
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        messages += [*session.opening, {"role": "user", "content": text}]
        reply = session.reply(messages, options, truncate)
    _write(reply, quiet)
    if not quiet and not reply.answer.text.endswith("\n"):
        click.echo()
    if reply.answer.truncated:
        click.echo(dropped_line(reply.answer.truncated), err=True)
    if stats:
        click.echo(stats_line(reply.answer), err=True)
    return reply.answer


def _write(reply: Reply, quiet: bool) -> None:
    from edgellm.cli.render import terminal_text

    tty = sys.stdout.isatty()
    try:
        for piece in reply:
            if not quiet:
                sys.stdout.write(terminal_text(piece) if tty else piece)
                sys.stdout.flush()
    except BaseException:
        reply.cancel()
        raise


def _json(answer: Answer, session: Session) -> dict[str, Any]:
    return {
        "text": answer.text,
        "ids": answer.ids,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "new_tokens": answer.new_tokens,
        "finish_reason": answer.finish_reason,
        "ttft_s": answer.ttft_s,
        "tpot_s": answer.tpot_s,
        "load_s": session.load_s,
        "speculation": answer.speculation,
    }
