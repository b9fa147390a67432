"""`edgellm check-pair`: whether a draft model fits its target, with reasons."""

from __future__ import annotations

import json

import click

from edgellm.cli.opening import model_path
from edgellm.cli.options import ModelFlags, json_option, plain_model_options

__all__ = ["check_pair"]

MARKS = {"ok": "  ok      ", "warning": "  warning ", "error": "  UNFIT   "}


@click.command("check-pair")
@click.argument("target")
@click.argument("draft_model", metavar="DRAFT")
@plain_model_options
@json_option
def check_pair(target: str, draft_model: str, model_flags: ModelFlags, as_json: bool) -> None:
    """Check that DRAFT can guess ahead for TARGET: tokens, special tokens, chat templates, contexts, measured speeds,
    and the memory both take. Exit code 1 if it cannot."""
    from edgellm.measure.pair import weigh_pair

    for name in (target, draft_model):
        model_path(name)
    report = weigh_pair(target, draft_model, **model_flags.given())
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        for finding in report.findings:
            click.echo(MARKS[finding.level] + finding.what)
        click.echo(f"memory: {report.total_bytes / 2**20:.0f} MB of {report.budget_bytes / 2**20:.0f} MB")
        click.echo(f"verdict: {report.verdict}")
    if report.verdict == "unfit":
        raise SystemExit(1)
