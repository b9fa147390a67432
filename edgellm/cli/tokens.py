"""`edgellm tokenize`: text to ids, without loading the weights."""

from __future__ import annotations

import json

import click

from edgellm.cli.opening import model_path, read_stdin
from edgellm.cli.options import Text, json_option

__all__ = ["tokenize"]


@click.command()
@click.argument("model")
@click.argument("text", type=Text(), required=False)
@click.option("--special/--no-special", default=False, help="Read control tokens in TEXT as such. Default: as text.")
@click.option("--bos/--no-bos", default=None, help="Put the begin token in front. Default: as the model says.")
@json_option
def tokenize(model: str, text: str | None, special: bool, bos: bool | None, as_json: bool) -> None:
    """Print the token ids of TEXT, one per line with the token as stored.

    Without TEXT: of stdin as it is, line ends and the last newline included. Bytes that are not UTF-8 are read as
    U+FFFD, and a note says so.
    """
    from edgellm import tokenizer

    tok = tokenizer.from_gguf(model_path(model))
    ids = [int(i) for i in tok.encode(read_stdin() if text is None else text, special=special, bos=bos)]
    tokens = [tok.tokens[i] for i in ids]
    if as_json:
        click.echo(json.dumps({"ids": ids, "tokens": tokens}))
    else:
        for i, token in zip(ids, tokens, strict=True):
            click.echo(f"{i:>7}  {token!r}")
