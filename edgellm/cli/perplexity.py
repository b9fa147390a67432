"""`edgellm perplexity`: how well a model predicts a text."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import click

from edgellm.cli.opening import open_llm
from edgellm.cli.options import ModelFlags, json_option, plain_model_options
from edgellm.errors import RequestError

__all__ = ["perplexity"]


@click.command()
@click.argument("model")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@plain_model_options
@json_option
def perplexity(model: str, file: Path, model_flags: ModelFlags, as_json: bool) -> None:
    """Perplexity of MODEL on the text in FILE, by llama-perplexity's rule: windows of --ctx (512) tokens, the second
    half of each scored."""
    from edgellm.measure.perplexity import SHORTEST, measure_perplexity

    ctx = model_flags.ctx or 512
    if ctx < SHORTEST:
        raise click.BadParameter(f"must be {SHORTEST} or more, not {ctx}", param_hint="--ctx")
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 text (byte {error.start})") from None

    def progress(done: int, total: int, ppl: float) -> None:
        if sys.stderr.isatty():
            click.echo(f"\rwindow {done} of {total}: perplexity so far {ppl:.3f}", nl=done == total, err=True)

    with open_llm(model, replace(model_flags, ctx=ctx)) as llm:
        result = measure_perplexity(llm, text, ctx, progress)
    if as_json:
        click.echo(json.dumps({"ppl": result.ppl, "n_tokens": result.n_tokens, "ctx": result.ctx}))
    else:
        click.echo(f"perplexity {result.ppl:.4f} over {result.n_tokens} tokens in windows of {result.ctx}")
