"""Imports go one way. The table below is the design's; an edge that is not in it fails."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.structure.sources import imported_modules, package_modules, syntax

# Part -> the parts it may import besides itself. A module belongs to the longest prefix that names it.
L0 = {"edgellm", "edgellm.config", "edgellm.errors", "edgellm.quants"}
PLAIN_MODELS = {f"edgellm.models.{name}" for name in ("config", "registry", "metadata")}
LOWER = {*L0, "edgellm.memory", "edgellm.loader", "edgellm.tokenizer", "edgellm.chat"}
SCHEDULING = {f"edgellm.engine.{name}" for name in ("request", "block_pool", "kv_cache", "scheduler")}
SCHEDULING |= {f"edgellm.engine.{name}" for name in ("pacer", "step_times")}
BACKENDS = {f"edgellm.backends{name}" for name in ("", ".base", ".reference", ".cpu")}
REFERENCE = {f"edgellm.backends.{name}" for name in ("base", "dequant", "dequant_iq", "reference_kv")}
ENGINE = {*SCHEDULING, "edgellm.engine", "edgellm.engine.model_runner"}
MAY_IMPORT: dict[str, set[str]] = {
    "edgellm": {"edgellm.config", "edgellm.llm"},
    "edgellm.__main__": {"edgellm", "edgellm.cli"},
    "edgellm.config": {"edgellm.errors"},
    "edgellm.errors": set(),
    "edgellm.quants": set(),
    "edgellm.loader": L0,
    "edgellm.tokenizer": {*L0, "edgellm.loader"},
    "edgellm.chat": {*L0, "edgellm.tokenizer"},
    "edgellm.backends": {*L0, *BACKENDS, "edgellm.backends.metal", "edgellm.backends.cuda"},
    "edgellm.backends.base": L0,
    "edgellm.backends.reference": {*L0, *REFERENCE},
    **{part: {*L0, *REFERENCE} for part in REFERENCE - {"edgellm.backends.base"}},
    "edgellm.backends.cpu": {*L0, "edgellm.backends.base", "edgellm.backends.dequant"},
    "edgellm.backends.metal": {*L0, "edgellm.backends.base", "edgellm.backends.dequant"},
    "edgellm.backends.cuda": {*L0, "edgellm.backends.base", "edgellm.backends.dequant"},
    "edgellm.models.config": L0,
    "edgellm.models.metadata": {*L0, "edgellm.models.config"},
    # `load_model` imports the forward code when it is called; the planner never calls it (test below).
    "edgellm.models.registry": {*L0, *PLAIN_MODELS, "edgellm.models"},
    "edgellm.memory": {*L0, "edgellm.models.config"},
    "edgellm.models": {*L0, *PLAIN_MODELS, "edgellm.backends.base", "edgellm.backends.dequant"},
    **{part: {*L0, *PLAIN_MODELS, *SCHEDULING, "edgellm.memory"} for part in SCHEDULING},
    "edgellm.engine.model_runner": {*L0, *PLAIN_MODELS, *ENGINE, "edgellm.backends.base"},
    "edgellm.engine": {*LOWER, *PLAIN_MODELS, *ENGINE, "edgellm.backends", "edgellm.backends.base"},
    "edgellm.hub": {*L0, "edgellm.loader", *PLAIN_MODELS, "edgellm.memory"},
    "edgellm.pairing": LOWER,
    "edgellm.placement": {*LOWER, "edgellm.models.config", "edgellm.backends"},
    "edgellm.opening": {
        *(*LOWER, *PLAIN_MODELS, *ENGINE, *BACKENDS),
        *("edgellm.hub", "edgellm.pairing", "edgellm.placement"),
    },
    "edgellm.llm": {*LOWER, *PLAIN_MODELS, *ENGINE, *BACKENDS, "edgellm.hub", "edgellm.opening"},
    "edgellm.measure": {*LOWER, *PLAIN_MODELS, *ENGINE, *BACKENDS, "edgellm.llm", "edgellm.opening", "edgellm.pairing"},
    "edgellm.server": {*LOWER, *PLAIN_MODELS, *ENGINE, "edgellm.llm", "edgellm.hub"},
    "edgellm.cli": {
        "edgellm.backends.metal",  # doctor checks its kernels
        *LOWER,
        *PLAIN_MODELS,
        *ENGINE,
        *BACKENDS,
        "edgellm.hub",
        "edgellm.llm",
        "edgellm.measure",
        "edgellm.server",
    },
}


def part_of(module: str) -> str:
    """The row of the table that a module belongs to."""
    while module not in MAY_IMPORT:
        module = module.rpartition(".")[0]
    return module


@pytest.mark.parametrize("module", package_modules())
def test_imports_go_one_way(module: str) -> None:
    known = package_modules()
    part = part_of(module)
    targets = {part_of(name) for name in imported_modules(known[module], known)} - {part}
    assert targets <= MAY_IMPORT[part], f"{module} may not import {sorted(targets - MAY_IMPORT[part])}"


@pytest.mark.parametrize("module", [m for m in package_modules() if part_of(m) in SCHEDULING])
def test_the_scheduler_side_knows_no_arrays(module: str) -> None:
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(syntax(package_modules()[module]))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    assert not {name.partition(".")[0] for name in names} & {"numpy", "numba", "mlx", "llvmlite"}


def test_a_plan_needs_no_backend_and_no_forward_code() -> None:
    code = (
        "import sys, edgellm.models.registry, edgellm.memory; print(*sorted(m for m in sys.modules if 'edgellm.' in m))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {part_of(name) for name in loaded} <= {*L0, *PLAIN_MODELS, "edgellm.memory", "edgellm.models"}


def test_imports_are_absolute() -> None:
    relative = [
        f"{path}:{node.lineno}"
        for path in package_modules().values()
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []
