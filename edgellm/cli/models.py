"""`edgellm list`, `rm`, `cp` and `verify`: the models that are here."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.opening import note
from edgellm.cli.options import json_option
from edgellm.cli.show import size_text
from edgellm.errors import RequestError, StoreError

if TYPE_CHECKING:
    from edgellm.hub.store import StoredModel

__all__ = ["cp", "list_models", "rm", "verify"]


@click.command("list")
@click.option("--partial", is_flag=True, help="Downloads that are not finished, and data that was found damaged.")
@json_option
def list_models(partial: bool, as_json: bool) -> None:
    """List the models that are here: edgellm's own, and those in Ollama's store and the Hugging Face cache."""
    from edgellm.hub import store
    from edgellm.hub.pull import partials

    if partial:
        _show_partials(partials(store.Store()), as_json)
        return
    models = store.list_models()
    if as_json:
        click.echo(json.dumps({"models": [_facts(model) for model in models]}))
        return
    rows = [("NAME", "ID", "SIZE", "MODIFIED", "IN")]
    for model in models:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified_at))
        rows.append((str(model.name), model.digest[:12], size_text(model.size), when, model.origin))
    _table(rows)
    if not models:
        note("no models yet; try: edgellm chat demo")


def _facts(model: StoredModel) -> dict[str, Any]:
    facts = {"name": str(model.name), "digest": model.digest, "size": model.size, "modified_at": model.modified_at}
    return {**facts, "origin": model.origin, "path": str(model.path)}


def _show_partials(entries: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"partials": entries}))
        return
    rows = [("NAME", "CAME", "SIZE", "STATE")]
    for entry in entries:
        state = "wrong digest: pull again to repair" if entry["bad"] else "pull again to go on"
        state = "left by a killed upload or create: edgellm rm --partial" if entry["left"] else state
        rows.append((entry["label"], size_text(entry["completed"]), size_text(entry["size"]), state))
    _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@click.command()
@click.argument("names", nargs=-1)
@click.option("--partial", is_flag=True, help="Remove unfinished downloads: those of NAMES, or all.")
def rm(names: tuple[str, ...], partial: bool) -> None:
    """Remove models from edgellm's store. Data goes with the last name that needs it."""
    from edgellm.hub import store
    from edgellm.hub.pull import remove_partials

    own = store.Store()
    if partial:
        removed = [label for name in names or ("",) for label in remove_partials(own, name)]
        note(f"removed {len(removed)} unfinished download{'' if len(removed) == 1 else 's'}")
        return
    if not names:
        raise click.UsageError("name a model, or give --partial")
    for name in names:
        _remove(name, own)


def _remove(name: str, own: Any) -> None:
    from edgellm.hub import names, store

    if names.is_path(name):
        raise RequestError(f"{name} is a file, not a stored model: remove it with rm")
    web = names.parse_web_file(name)
    wanted = web.name if web else names.parse_name(name)
    if own.existing(wanted) is None:
        model = store.find(name, own, to_run=False)
        if model.origin != "edgellm":
            with_what = f"ollama rm {model.name}" if model.origin == "ollama" else "hf cache rm"
            raise StoreError(f"{model.name} lies in {model.origin}'s store; remove it there ({with_what})")
        wanted = model.name
    known = own.existing(wanted)
    own.remove(wanted)
    click.echo(f"removed {known}", err=True)


@click.command()
@click.argument("source")
@click.argument("target")
def cp(source: str, target: str) -> None:
    """Give a stored model a second name. No data is copied."""
    from edgellm.hub import names, store

    own = store.Store()
    model = store.find(source, own, to_run=False)
    if model.origin != "edgellm":
        raise StoreError(
            f"{model.name} lies in {model.origin}'s store; take it into edgellm's with a Modelfile: "
            f"echo 'FROM {model.name}' | edgellm create {target} -f -"
        )
    made = own.copy(model.name, names.parse_name(target))
    click.echo(f"{made} is {model.name}", err=True)


@click.command()
@click.argument("name")
@click.option("--scan", is_flag=True, help="Also look through all scales for NaN and infinity.")
@json_option
@click.pass_context
def verify(ctx: click.Context, name: str, scan: bool, as_json: bool) -> None:
    """Hash a stored model again and check its tensors. Damaged data is set aside, and the next pull repairs it."""
    from edgellm.hub import verify as checks

    report = checks.verify(name, scan=scan)
    if as_json:
        click.echo(json.dumps(vars(report)))
    else:
        for problem in report.problems:
            note(f"{report.name}: {problem}")
        if not report.problems:
            scanned = f", the scales of {report.scanned}" if scan else ""
            hashed = f"{size_text(report.hashed_bytes)} hashed" if report.hashed_bytes else "no digest to compare with"
            click.echo(f"{report.name} is sound: {hashed}, {report.tensors} tensors checked{scanned}")
        if report.not_scanned:
            note(f"{len(report.not_scanned)} tensors are of types whose scales cannot be looked through")
    if report.problems:
        ctx.exit(1)
