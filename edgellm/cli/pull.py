"""`edgellm pull`: plans first, then downloads; what came is kept whatever happens."""

from __future__ import annotations

import json
import sys
import threading

import click

from edgellm.cli.opening import note
from edgellm.cli.options import Size, json_option
from edgellm.cli.progress import PullProgress

__all__ = ["pull"]


@click.command()
@click.argument("name")
@click.option("--insecure", is_flag=True, help="Allow registries over plain http.")
@click.option("--connections", type=click.IntRange(1, 64), help="Ranges fetched at once. Default 4; 8 from 1 GiB on.")
@click.option("--limit-rate", type=Size(), help="Bytes per second at most, such as 5M.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask when the model will not fit this machine.")
@json_option
def pull(name: str, insecure: bool, connections: int | None, limit_rate: int | None, yes: bool, as_json: bool) -> None:
    """Download a model into the store; the same command goes on after a stop.

    NAME: a name of Ollama's library (llama3.2:3b), hf.co/USER/REPO[:QUANT], hf:USER/REPO/FILE.gguf, the https address
    of a .gguf file, HOST/NAMESPACE/MODEL[:TAG] of another registry, or demo.
    """
    from edgellm.hub.pull import PullOptions
    from edgellm.hub.pull import pull as pull_now
    from edgellm.hub.store import Store

    options = PullOptions(insecure=insecure, connections=connections or 0, limit_rate=float(limit_rate or 0))
    store = Store()
    stop = threading.Event()
    if not yes:
        _plan_first(name, store, insecure)
    try:
        with PullProgress() as progress:
            model = pull_now(name, store, options, progress, stop)
    except KeyboardInterrupt:
        stop.set()
        note(f"stopped; what came is kept, go on with: edgellm pull {name}")
        raise
    if as_json:
        facts = {"name": str(model.name), "path": str(model.path), "digest": model.digest, "size": model.size}
        click.echo(json.dumps(facts))


def _plan_first(name: str, store: object, insecure: bool) -> None:
    """Says whether the model will fit, and asks on a terminal where it will not. No plan is no reason not to pull."""
    from edgellm.errors import EdgeLLMError, PullError, RequestError
    from edgellm.hub import names, plan
    from edgellm.hub import store as stores
    from edgellm.hub.sources import find_remote
    from edgellm.hub.web import Web

    assert isinstance(store, stores.Store)
    if names.is_path(name) or names.is_demo(name):
        return
    try:
        with Web(insecure) as web:
            remote = find_remote(web, name)
            if all(file.layer.digest and store.has_blob(file.layer) for file in remote.files):
                return
            facts = plan.remote_facts(web, remote)
    except (PullError, RequestError):
        return  # the pull itself will say so
    except EdgeLLMError as error:
        _ask(plan.why_not(error))
        return
    made = plan.make(facts)
    line = plan.verdict(facts, made)
    if made.memory.fits:
        note(line)
    else:
        _ask("; ".join([line, *made.advice]))


def _ask(problem: str) -> None:
    note(problem)
    tty = sys.stdin.isatty() and sys.stderr.isatty()
    if tty and not click.confirm("Pull it all the same?", err=True):
        raise SystemExit(1)
