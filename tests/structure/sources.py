"""The repository's Python files and the modules they are."""

from __future__ import annotations

import ast
from functools import cache, lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"edgellm": "edgellm", "backends": "edgellm.backends", "models": "edgellm.models"}


@lru_cache(maxsize=1)
def package_modules() -> dict[str, Path]:
    """Module name -> file, of everything that is installed."""
    modules = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = list(path.relative_to(ROOT / folder).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            modules[".".join([package, *parts])] = path
    return modules


@cache
def syntax(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_modules(path: Path, known: dict[str, Path]) -> set[str]:
    """Our modules that a file imports, anywhere in it, but for what only type checkers see."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.update({full if full in known else node.module} & known.keys())
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(syntax(path))
    return found
