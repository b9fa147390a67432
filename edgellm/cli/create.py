"""`edgellm create`: a model made from a Modelfile."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from edgellm.cli.opening import note
from edgellm.errors import RequestError

__all__ = ["create"]


@click.command()
@click.argument("name")
@click.option("-f", "--file", "file", default="Modelfile", help="The Modelfile; - for stdin. Default: ./Modelfile.")
def create(name: str, file: str) -> None:
    """Make the model NAME from a Modelfile (FROM, PARAMETER, SYSTEM, TEMPLATE in Jinja, MESSAGE, LICENSE)."""
    from edgellm.hub.create import create as create_now
    from edgellm.hub.modelfile import parse_modelfile
    from edgellm.server.options import parse_options

    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{file} is not UTF-8 text") from None
    modelfile = parse_modelfile(text)
    parse_options(modelfile.params, source=name)  # says now what would fail in every answer
    for line in modelfile.notes:
        note(line)
    folder = Path.cwd() if file == "-" else Path(file).absolute().parent
    model = create_now(name, modelfile, folder, say=note)
    click.echo(f"created {model.name}", err=True)
