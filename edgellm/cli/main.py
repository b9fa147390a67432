"""The `edgellm` program: a table of commands, each imported only when it is called, and one place that turns errors
into a line on stderr and an exit code (0 done, 1 the work failed, 2 wrong usage, 130 interrupted)."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import click

from edgellm.errors import EdgeLLMError

__all__ = ["COMMANDS", "Globals", "cli", "main"]

COMMANDS: dict[str, tuple[str, str]] = {
    # name: (module:attribute, the line `edgellm --help` shows)
    "chat": ("edgellm.cli.chat:chat", "Talk with a model in the terminal."),
    "run": ("edgellm.cli.run:run", "Answer one prompt and exit."),
    "serve": ("edgellm.cli.serve:serve", "Serve models to Ollama and OpenAI clients."),
    "pull": ("edgellm.cli.pull:pull", "Download a model; resumes, verifies, checks that it fits."),
    "create": ("edgellm.cli.create:create", "Make a model from a Modelfile."),
    "list": ("edgellm.cli.models:list_models", "List the models that are here."),
    "show": ("edgellm.cli.show:show", "Show what a model file holds."),
    "rm": ("edgellm.cli.models:rm", "Remove a model."),
    "cp": ("edgellm.cli.models:cp", "Give a model a second name."),
    "verify": ("edgellm.cli.models:verify", "Hash a stored model again and check its tensors."),
    "ps": ("edgellm.cli.serve:ps", "List the models that a running server has loaded."),
    "stop": ("edgellm.cli.serve:stop", "Unload a model from a running server."),
    "plan": ("edgellm.cli.plan:plan", "Say whether a model fits a machine, before its download."),
    "check-pair": ("edgellm.cli.check_pair:check_pair", "Check that a draft model fits its target."),
    "tokenize": ("edgellm.cli.tokens:tokenize", "Turn text into token ids."),
    "perplexity": ("edgellm.cli.perplexity:perplexity", "Measure a model's perplexity on a text file."),
    "bench": ("edgellm.cli.bench:bench", "Measure speed, and how much of the memory bandwidth it uses."),
    "doctor": ("edgellm.cli.doctor:doctor", "Describe this machine and which backends can run on it."),
}


class Globals(NamedTuple):
    """What every command can take with `@click.pass_obj`."""

    debug: bool = False


class LazyGroup(click.Group):
    """Knows its commands by name; imports a command's module when it runs, or when its own `--help` is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module_name, _, attribute = COMMANDS[cmd_name][0].partition(":")
        module = importlib.import_module(module_name)
        _show_warnings()
        command = getattr(module, attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _show_warnings() -> None:
    """Warnings of the library as lines on stderr, like the commands' own."""
    import logging

    logging.basicConfig(format="edgellm: %(message)s", level=logging.WARNING)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from edgellm import __version__

        click.echo(f"edgellm {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Print it.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails.")
def cli() -> None:
    """Run language models (GGUF files) on this machine.

    MODEL is a path to a .gguf file, the name of a stored model, or `demo` (a small chat model, fetched on first use).
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv` (without the program's name; default: the process's own) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # `--debug` may stand anywhere before a `--`, as people add it to the end of the line that failed.
    own = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in own
    words = [word for word in own if word != "--debug"] + words[len(own) :]
    _open_streams()
    try:
        code = cli.main(args=words, prog_name="edgellm", standalone_mode=False, obj=Globals(debug))
        sys.stdout.flush()
    except Exception as error:
        return _report(error, debug)
    except KeyboardInterrupt:
        return _interrupted()
    return code if isinstance(code, int) else 0


def _open_streams() -> None:
    """A character that the terminal does not know becomes `?`. A stream that the caller closed leads nowhere: its
    number would else go to the next file that is opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            while (opened := os.open(os.devnull, os.O_RDWR)) < number:
                pass
            setattr(sys, name, os.fdopen(opened, "w" if number else "r"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _report(error: Exception, debug: bool) -> int:
    if isinstance(error, click.Abort):
        return _interrupted()
    if isinstance(error, BrokenPipeError):
        # The reader of our output went away; nothing more can be said to it, not even by the interpreter's last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if debug:
        traceback.print_exc()
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, EdgeLLMError):
        _say(str(error))
        return error.exit_code
    if isinstance(error, MemoryError):
        _say(f"out of memory: {str(error) or 'the system gives no more'}; ask for less with --memory or --ctx")
    elif isinstance(error, OSError):
        _say(str(error) or type(error).__name__)
    elif not debug:
        _say(f"a bug in edgellm: {type(error).__name__}: {error} (run again with --debug for the traceback)")
    return 1


def _interrupted() -> int:
    click.echo("", err=True)
    return 130


def _say(message: str) -> None:
    click.echo("edgellm: " + " ".join(message.split("\n")), err=True)
