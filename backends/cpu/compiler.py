"""From a kernel's Python source to object code: Numba as front end, our own LLVM pipeline behind it.

Numba types the function and writes LLVM IR for it and for each `@inline` helper (no machine code, no wrappers, no
runtime). The modules are linked, the helpers inlined, a wrapper `void name(i64, i64, i64, i64)` put around Numba's
calling convention, and LLVM's -O3 pipeline run for the target: this machine or another one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from numba.core import compiler, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from edgellm.backends.cpu.emit import Emitter, llvm_type
from edgellm.backends.cpu.jit import SYMBOLS_ALLOWED, Inline, Kernel, Target, symbol
from edgellm.backends.cpu.simd import Op
from edgellm.backends.cpu.unroll import namespace_of, unrolled

_SCALARS = {"i64": types.int64, "f32": types.float32, "void": types.void}
_vectors: dict[str, types.Type] = {}


def _numba_type(name: str) -> types.Type:
    if name in _SCALARS:
        return _SCALARS[name]
    if name not in _vectors:
        cls = type(name, (types.Type,), {})
        vector = cls(name=name)

        @register_model(cls)
        class Model(models.PrimitiveModel):  # type: ignore[misc]
            def __init__(self, manager: Any, kind: Any):
                super().__init__(manager, kind, llvm_type(name))

        _vectors[name] = vector
    return _vectors[name]


def _flags() -> compiler.Flags:
    flags = compiler.Flags()
    flags.no_compile = True
    flags.nrt = False
    flags.error_model = "numpy"
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.boundscheck = False
    return flags


class _Compilation:
    """One kernel and the helpers it calls: their Numba forms and LLVM modules."""

    def __init__(self, target: Target):
        self.target = target
        self.forms: dict[int, Any] = {}
        self.libraries: list[Any] = []

    def compile(self, function: Callable[..., Any], args: tuple[types.Type, ...], result: types.Type | None) -> Any:
        namespace = {name: self.form(value) for name, value in namespace_of(function).items()}
        plain = unrolled(function, namespace)
        context = cpu_target.typing_context, cpu_target.target_context
        compiled = compiler.compile_extra(*context, plain, args, result, _flags(), {})
        self.libraries.append(compiled.library)
        # Python builtins (min, max, range) that Numba compiles as functions of their own.
        self.libraries += [x for x in compiled.library._linking_libraries if x not in self.libraries]
        return compiled

    def form(self, value: Any) -> Any:
        """What Numba sees in place of a global: intrinsics for Ops and helpers, everything else unchanged."""
        if not isinstance(value, (Op, Inline)):
            return value
        if id(value) not in self.forms:
            self.forms[id(value)] = self._op(value) if isinstance(value, Op) else self._helper(value)
        return self.forms[id(value)]

    def _op(self, op: Op) -> Any:
        emit, isa = op.emitter(self.target.isa), self.target.isa

        def typer(context: Any, *args: Any) -> Any:
            if len(args) != len(op.params):
                raise TypeError(f"{op.name} takes {len(op.params)} arguments, not {len(args)}")
            bound, signature = None, []
            for param, given in zip(op.params, args, strict=True):
                if param == "lit":
                    if not isinstance(given, types.IntegerLiteral):
                        return None
                    signature.append(given)
                elif param == "V":
                    bound = bound or given
                    signature.append(bound)
                else:
                    signature.append(_numba_type(param))
            result = bound if op.result == "V" else _numba_type(op.result)

            def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                literal = [
                    t.literal_value if isinstance(t, types.IntegerLiteral) else v
                    for t, v in zip(sig.args, values, strict=True)
                ]
                out = emit(Emitter(builder, isa), *literal)
                return context.get_dummy_value() if out is None or op.result == "void" else out

            return result(*signature), generate

        return intrinsic(prefer_literal=True)(_with_arity(typer, len(op.params)))

    def _helper(self, helper: Inline) -> Any:
        compiled: dict[Any, Any] = {}

        def typer(context: Any, *args: Any) -> Any:
            args = tuple(types.unliteral(a) for a in args)
            if args not in compiled:
                compiled[args] = self.compile(helper.function, args, None)
            unit = compiled[args]

            def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                return context.call_internal_no_propagate(builder, unit.fndesc, sig, values)[1]

            return unit.signature.return_type(*args), generate

        return intrinsic(_with_arity(typer, helper.function.__code__.co_argcount))


def _with_arity(typer: Callable[..., Any], count: int) -> Callable[..., Any]:
    names = ["context", *(f"a{i}" for i in range(count))]
    kinds = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names]
    typer.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    return typer


def _wrapper(name: str, inner: str) -> str:
    return f"""
declare i32 @"{inner}"(ptr, ptr, i64, i64, i64, i64)
define void @{name}(i64 %args, i64 %begin, i64 %end, i64 %scratch) {{
  %ret = alloca ptr
  %exc = alloca ptr
  %status = call i32 @"{inner}"(ptr %ret, ptr %exc, i64 %args, i64 %begin, i64 %end, i64 %scratch)
  ret void
}}
"""


def _machine(target: Target, jit: bool) -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    model = {"reloc": "default", "codemodel": "jitdefault"} if jit else {"reloc": "pic", "codemodel": "small"}
    kind = llvm.Target.from_triple(target.triple)
    return kind.create_target_machine(cpu=target.cpu, features=target.features, opt=3, jit=jit, **model)


def _retarget(text: str, target: Target, layout: str) -> Any:
    """Parse IR text with its triple and data layout replaced (Numba writes them for the host)."""
    text = re.sub(r"^target (datalayout|triple) = .*$", "", text, flags=re.M)
    return llvm.parse_assembly(f'target datalayout = "{layout}"\ntarget triple = "{target.triple}"\n{text}')


def _optimise(module: Any, machine: Any) -> None:
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    options.slp_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def _check_symbols(name: str, assembly: str) -> None:
    called = set(re.findall(r"^\s+(?:callq?|bl|b|jmp|movabsq)\s+\$?([A-Za-z_][\w.@$]*)", assembly, flags=re.M))
    outside = {c.split("@")[0] for c in called} - SYMBOLS_ALLOWED - {symbol(name)}
    outside = {c for c in outside if not c.startswith((".L", "L"))}
    if outside:
        raise RuntimeError(f"kernel {name} calls {', '.join(sorted(outside))}: only {SYMBOLS_ALLOWED} can be linked")


@global_compiler_lock  # type: ignore[untyped-decorator]
def compile_kernel(item: Kernel, target: Target, jit: bool = True) -> tuple[bytes, str]:
    """Object code and assembly of one kernel. `jit` False: position-independent, for a linker."""
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    unit = _Compilation(target)
    entry = unit.compile(item.function, (types.int64,) * 4, types.void)
    machine = _machine(target, jit)
    layout = str(machine.target_data)
    module = _retarget(_wrapper(symbol(item.name), entry.fndesc.llvm_func_name), target, layout)
    for library in (x for x in unit.libraries if x.name != "nrt"):
        part = _retarget(str(library._final_module), target, layout)
        for function in part.functions:
            if not function.is_declaration:
                function.linkage = "weak_odr"  # several libraries may hold the same builtin
        module.link_in(part)
    for function in module.functions:
        if not function.is_declaration and function.name != symbol(item.name):
            function.linkage = "internal"
            function.add_function_attribute("alwaysinline")
    module.verify()
    _optimise(module, machine)
    assembly = machine.emit_assembly(module)
    _check_symbols(item.name, assembly)
    return machine.emit_object(module), assembly
