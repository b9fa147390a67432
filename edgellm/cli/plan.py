"""`edgellm plan`: will it fit, and how fast can it be, before anything is downloaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from edgellm.cli.options import Size, json_option
from edgellm.cli.show import size_text
from edgellm.errors import RequestError

if TYPE_CHECKING:
    from edgellm.hub.plan import ModelFacts, Plan

__all__ = ["plan"]


@click.command()
@click.argument("model")
@click.option("--ctx", type=click.IntRange(1, 1 << 30), help="Tokens of one conversation. Default: the trained length.")
@click.option("--kv-type", type=click.Choice(["f32", "f16", "q8_0"]), default="f16")
@click.option("--machine", "machine_name", metavar="NAME", help="Such as m2-ultra-192gb. Default: this machine.")
@click.option("--memory", type=Size(), help="Budget, instead of what the machine allows.")
@click.option("--draft", metavar="MODEL", help="A draft model that runs beside it.")
@click.option("--insecure", is_flag=True, help="Allow registries over plain http.")
@json_option
def plan(
    model: str,
    ctx: int | None,
    kv_type: str,
    machine_name: str | None,
    memory: int | None,
    draft: str | None,
    insecure: bool,
    as_json: bool,
) -> None:
    """Say whether MODEL fits a machine. Of a model that is not here only the header is read."""
    from edgellm.engine.speculate import split_draft
    from edgellm.hub import machines
    from edgellm.hub import plan as plans

    machine = machines.machine(machine_name) if machine_name else None
    facts = _facts(model, insecure)
    # As `run --draft` takes it: `lookup` guesses from the prompt, with no model and no memory to speak of.
    drafts = [part for part in split_draft(draft or "") if part != "lookup"]
    if len(drafts) > 1:
        raise RequestError(f"one draft model at most, not {len(drafts)}: {', '.join(drafts)}")
    draft_facts = _facts(drafts[0], insecure) if drafts else None
    bandwidth = None if machine else _own_bandwidth()
    if machine is None and memory is None:
        from edgellm.llm import memory_budget

        memory = memory_budget()
    made = plans.make(facts, machine, ctx, kv_type, draft_facts, memory, bandwidth)
    table = list(machines.MACHINES.values())
    fitting = plans.machines_that_fit(facts, table, made.memory.ctx, kv_type, draft_facts, memory)
    if as_json:
        click.echo(json.dumps({"model": facts.name, **made.as_json(), "machines": fitting}))
        return
    _print(facts, made)
    where = "every machine of the table" if len(fitting) == len(table) else ", ".join(fitting) or "none of the table"
    within = f" within {size_text(memory)}" if memory else ""
    click.echo(f"with {made.memory.ctx} tokens it fits{within}: {where}")


def _facts(model: str, insecure: bool) -> ModelFacts:
    """From the file where it is here, else from the headers of its source."""
    from edgellm.errors import ModelNotFound
    from edgellm.hub import names, plan, store
    from edgellm.hub.sources import find_remote
    from edgellm.hub.web import Web

    if names.is_path(model):
        return plan.local_facts(store.resolve(model))
    try:
        return plan.local_facts(store.find(model).path, model)
    except ModelNotFound:
        if names.is_demo(model):
            return plan.local_facts(store.resolve(model), model)
    with Web(insecure) as web:
        return plan.remote_facts(web, find_remote(web, model))


def _own_bandwidth() -> float:
    from edgellm.backends.cpu.bandwidth import measure_bandwidth
    from edgellm.cli.machine import default_threads

    return measure_bandwidth(default_threads(), n_bytes=256 << 20, reads=4)


def _print(facts: ModelFacts, made: Plan) -> None:
    from edgellm.hub import plan as plans

    m = made.memory
    click.echo(plans.verdict(facts, made))
    rows = [("weights", m.weights_bytes), (f"KV cache, {m.ctx} tokens, {made.kv_type}", m.kv_bytes)]
    rows += [("scratch", m.scratch_bytes), ("draft model", m.draft_bytes), ("runtime", m.runtime_bytes)]
    for label, n in rows:
        if n:
            click.echo(f"  {label:<36} {size_text(n):>10}")
    click.echo(f"  {'total':<36} {size_text(m.total_bytes):>10} of {size_text(m.budget_bytes)}")
    click.echo(f"  {'longest context that fits':<36} {m.max_ctx:>10} tokens (trained: {made.trained_ctx})")
    if made.tok_s_ceiling is not None:
        click.echo(f"  {'ceiling from memory bandwidth':<36} {made.tok_s_ceiling:>10.1f} tokens/s")
    for line in made.advice:
        click.echo(f"instead: {line}")
