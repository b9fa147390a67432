"""`edgellm serve`, `ps` and `stop`: a server, and what one says when it runs."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.main import Globals
from edgellm.cli.options import ModelFlags, json_option, model_options
from edgellm.cli.show import size_text
from edgellm.errors import RequestError

if TYPE_CHECKING:
    from edgellm.server.settings import ServerSettings

__all__ = ["ps", "serve", "stop"]


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option("--host", help="Address to listen on. Default 127.0.0.1: this machine only.")
@click.option("--port", type=click.IntRange(0, 65535), help="Default 11434; 0: any free one.")
@click.option("--api-key", help="Clients must send it as a bearer token. Default: EDGELLM_API_KEY, or none.")
@click.option("--keep-alive", help="How long an idle model stays loaded, such as 30m; -1: for ever. Default 5m.")
@model_options
@click.pass_obj
def serve(
    program: Globals,
    models: tuple[str, ...],
    host: str | None,
    port: int | None,
    api_key: str | None,
    keep_alive: str | None,
    model_flags: ModelFlags,
) -> None:
    """Serve models to Ollama, OpenAI and Anthropic clients, and a chat page at /ui. --debug logs more.

    All stored models are served and loaded when asked for. MODELs given here (names, or paths to .gguf files) are
    loaded at once.
    """
    from edgellm.server.build import build_app
    from edgellm.server.run import bind, serve, setup_logging
    from edgellm.server.settings import http_address

    settings = _settings(host, port, api_key, keep_alive, program.debug, model_flags)
    app = build_app(settings, models)
    sock = bind(settings.host, settings.port)
    setup_logging(settings.debug)
    address = http_address(settings.host, sock.getsockname()[1])
    click.echo(f"edgellm: serving on {address} (chat page: {address}/ui)", err=True)
    if not settings.is_loopback and not settings.api_key:
        click.echo("edgellm: other machines can reach this server and no --api-key is set", err=True)
    serve(app, settings, sock)


def _settings(
    host: str | None, port: int | None, api_key: str | None, keep_alive: str | None, debug: bool, flags: ModelFlags
) -> ServerSettings:
    """The environment's settings with the flags laid over them."""
    from edgellm.server.durations import keep_alive_seconds
    from edgellm.server.settings import ServerSettings

    if api_key == "":  # an unset variable of a script, most likely: not a reason to let everybody in
        raise click.BadParameter("it is empty; leave the option out for a server without a key", param_hint="--api-key")
    given: dict[str, Any] = {"api_key": api_key, "debug": debug or None}
    try:
        given["keep_alive"] = keep_alive_seconds(keep_alive, bare_numbers=True)
    except RequestError as error:
        raise click.BadParameter(str(error).removeprefix("keep_alive: "), param_hint="--keep-alive") from None
    model = flags.given()
    for name in ("ctx", "memory", "kv_type", "backend", "threads", "draft"):
        given[name] = model.pop(name, None)
    given["extra"] = model or None
    settings = ServerSettings.from_env().at(host, port)
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


_host = click.option("--host", help="Where the server is. Default: EDGELLM_HOST, OLLAMA_HOST, or 127.0.0.1.")
_port = click.option("--port", type=click.IntRange(1, 65535), help="Default 11434.")
_key = click.option("--api-key", help="Default: EDGELLM_API_KEY.")


@click.command()
@_host
@_port
@_key
@json_option
def ps(host: str | None, port: int | None, api_key: str | None, as_json: bool) -> None:
    """List the models that a running server has loaded."""
    from edgellm.server.client import ServerClient, server_url

    with ServerClient(server_url(host, port), api_key) as client:
        models = client.loaded()
    if as_json:
        click.echo(json.dumps({"models": models}))
        return
    if not models:
        click.echo("no model is loaded")
    for model in models:
        size = size_text(model["size"])
        context = model.get("context_length", "?")  # older Ollama servers do not say it
        click.echo(f"{model['name']:<40} {size:>10}  context {context:>7}  until {_until(model)}")


def _until(model: dict[str, Any]) -> str:
    """When a model goes, in words; as the server has it where this Python reads no nanoseconds (before 3.11)."""
    try:
        left = (datetime.fromisoformat(model["expires_at"]) - datetime.now(timezone.utc)).total_seconds()
    except ValueError:
        return str(model["expires_at"])
    if left > 50 * 365 * 86400:
        return "stopped"
    return f"{max(left, 0) / 60:.0f} min from now" if left >= 60 else f"{max(left, 0):.0f} s from now"


@click.command()
@click.argument("model")
@_host
@_port
@_key
def stop(model: str, host: str | None, port: int | None, api_key: str | None) -> None:
    """Unload MODEL from a running server, once its running answers have ended."""
    from edgellm.server.client import ServerClient, server_url

    with ServerClient(server_url(host, port), api_key) as client:
        client.unload(model)
