"""The package list, exported names, the change log and the sizes of files and functions are what they say."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import edgellm
from tests.structure.sources import FOLDERS, ROOT, package_modules, syntax

MAX_LINES, MAX_MODEL_LINES = 400, 300
MAX_FUNCTION, MAX_KERNEL = 60, 120
TABLES = {"backends/cpu/simd.py": 700, "backends/cpu/simd_dot.py": 600}
"""Longer because they are lists of small definitions, better read in one place."""
PACKAGES = [name for name, path in package_modules().items() if path.name == "__init__.py"]
DATA = {"edgellm.backends.metal.kernels": "backends/metal/kernels", "edgellm.server.ui": "edgellm/server/ui"}
"""Folders without Python that are installed too; setuptools counts them as packages."""


def _project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML; newer ones run this test")
    parsed: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return parsed


def test_the_package_list_is_the_tree() -> None:
    assert sorted(_project()["tool"]["setuptools"]["packages"]) == sorted([*PACKAGES, *DATA])
    assert all(list((ROOT / folder).iterdir()) for folder in DATA.values())
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} holds code and is no package"


def test_the_newest_entry_of_the_change_log_is_the_version() -> None:
    heading = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading and heading[1] == edgellm.__version__
    assert _project()["project"]["version"] == edgellm.__version__


@pytest.mark.parametrize("module", package_modules())
def test_exported_names_exist(module: str) -> None:
    tree = syntax(package_modules()[module])
    exported = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    if not exported:
        return
    if module.startswith(("edgellm.backends.metal", "edgellm.backends.cuda")):
        defined = {name for node in ast.walk(tree) if isinstance(node, ast.stmt) for name in _bound_names(node)}
        assert set(exported[0]) <= defined  # importing them needs their extra
        return
    loaded = importlib.import_module(module)
    assert [name for name in exported[0] if not hasattr(loaded, name)] == []


def _bound_names(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


@pytest.mark.parametrize("path", [*package_modules().values(), *sorted((ROOT / "tests").rglob("*.py"))], ids=str)
def test_files_are_small(path: Path) -> None:
    limit = MAX_MODEL_LINES if path.parent == ROOT / "models" else MAX_LINES
    limit = TABLES.get(str(path.relative_to(ROOT)), limit)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize("path", package_modules().values(), ids=str)
def test_functions_are_small(path: Path) -> None:
    too_long = []
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.FunctionDef):
            limit = MAX_KERNEL if "backends" in path.parts and path.parent.name != "backends" else MAX_FUNCTION
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > limit:
                too_long.append(f"{node.name}: {lines} lines")
    assert too_long == []


def test_ci_finds_the_one_test_command_in_the_readme() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if re.search(r"^python3 -m venv .* -m pytest$", line)]) == 1
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_scheduler_side_is_small() -> None:
    names = ("request", "block_pool", "kv_cache", "scheduler")
    files = [ROOT / "edgellm" / "engine" / f"{name}.py" for name in names]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 700


def test_the_architecture_page_matches_the_tree() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    named = set(re.findall(r"`((?:edgellm|backends|models|tests|bench|docs)/[\w./]*)`", text))
    assert [name for name in named if not (ROOT / name).exists()] == []
    folders = {f"{'/'.join(path.relative_to(ROOT).parts[:-1])}/" for path in package_modules().values()}
    assert sorted(folders - named - {"edgellm/"}) == [], "folders that the page does not name"
