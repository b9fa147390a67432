"""Rewrites a kernel's syntax tree before compilation, so that kernels can be written as loops over registers.

- `for i in unroll(N): body` becomes N copies of the body with `i` a constant;
- `acc = registers(N)` disappears, `acc[<constant>]` becomes the variable `acc_<constant>`, `tuple(acc)` all of them;
- `if <constant>:` keeps only the branch taken (constants: closure variables and module globals of plain type).
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

PLAIN = (int, str, bool, tuple, type(None))


class _Fold(ast.NodeTransformer):
    def __init__(self, constants: Mapping[str, Any]):
        self.constants = dict(constants)
        self.registers: dict[str, int] = {}

    def known(self, node: ast.expr) -> Any:
        """The value of an expression of constants; LookupError otherwise."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id not in self.constants:
                raise LookupError(part.id)
            if isinstance(part, (ast.Call, ast.Attribute)):
                raise LookupError(ast.dump(part))
        code = compile(ast.Expression(copy.deepcopy(node)), "<constant>", "eval")
        return eval(code, {"__builtins__": {}}, self.constants)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and node.id in self.constants:
            return ast.copy_location(ast.Constant(self.constants[node.id]), node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id in self.registers:
            name = f"{node.value.id}_{self.known(node.slice)}"
            return ast.copy_location(ast.Name(name, node.ctx), node)
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Assign(self, node: ast.Assign) -> Any:
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            if all(_is_call(v, "registers") for v in value.elts):
                for name, made in zip(target.elts, value.elts, strict=True):
                    self._declare(name, made)
                return None
        elif _is_call(value, "registers"):
            self._declare(target, value)
            return None
        return self.generic_visit(node)

    def _declare(self, name: ast.expr, made: ast.expr) -> None:
        assert isinstance(name, ast.Name) and isinstance(made, ast.Call)
        self.registers[name.id] = self.known(made.args[0])

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if _is_call(node, "tuple") and isinstance(node.args[0], ast.Name) and node.args[0].id in self.registers:
            name = node.args[0].id
            names: list[ast.expr] = [ast.Name(f"{name}_{i}", ast.Load()) for i in range(self.registers[name])]
            return ast.copy_location(ast.Tuple(names, ast.Load()), node)
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_If(self, node: ast.If) -> Any:
        try:
            taken = self.known(node.test)
        except LookupError:
            return self.generic_visit(node)
        return self._body(node.body if taken else node.orelse)

    def visit_For(self, node: ast.For) -> Any:
        source = node.iter
        if not (_is_call(source, "unroll") and isinstance(source, ast.Call) and isinstance(node.target, ast.Name)):
            return self.generic_visit(node)
        name, out = node.target.id, []
        for i in range(self.known(source.args[0])):
            self.constants[name] = i
            out += self._body(copy.deepcopy(node.body))
        self.constants.pop(name, None)
        return out

    def _body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in statements:
            result = self.visit(statement)
            out += result if isinstance(result, list) else [result] if result is not None else []
        return out


def _is_call(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def namespace_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Globals and closure variables a function can see."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {**function.__globals__, **{name: cell.cell_contents for name, cell in cells}}


def unrolled(function: Callable[..., Any], namespace: Mapping[str, Any]) -> Any:
    """`function` rewritten and compiled against `namespace` (its own, with Ops replaced by what the compiler knows)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.returns = None
    for argument in definition.args.args:
        argument.annotation = None
    bound = {a.arg for a in definition.args.args} | {
        n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    constants = {k: v for k, v in namespace.items() if isinstance(v, PLAIN) and k not in bound}
    fold = _Fold(constants)
    definition.body = fold._body(definition.body)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    scope = dict(namespace)
    exec(compile(tree, inspect.getsourcefile(function) or "<kernel>", "exec"), scope)
    return scope[definition.name]
