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
from numba.core.compiler_machinery import PassManager
from numba.core.registry import cpu_target
from numba.core.types.misc import unliteral
from numba.extending import intrinsic, models, register_model

from edgellm.backends.cpu.emit import Emitter, llvm_type
from edgellm.backends.cpu.jit import SYMBOLS_ALLOWED, Inline, Kernel, Target, symbol
from edgellm.backends.cpu.simd import Op
from edgellm.backends.cpu.unroll import namespace_of, unrolled

_SCALARS = {"i64": types.int64, "f32": types.float32, "void": types.void}
_vectors: dict[str, types.Type] = {}
LIBRARY_CALLS = {"exp", "exp2", "exp10", "log", "log2", "log10", "pow", "powi", "sin", "cos", "tan", "tanh", "ldexp"}
"""LLVM intrinsics that become calls into libm."""


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


UNNEEDED = {
    "WithLift",
    "InlineClosureLikes",
    "RewriteSemanticConstants",
    "DeadBranchPrune",
    "GenericRewrites",
    "RewriteDynamicRaises",
    "MakeFunctionToJitFunction",
    "InlineInlinables",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "LiteralPropagationSubPipelinePass",
    "InlineOverloads",
    "PreParforPass",
    "ParforPass",
    "ParforFusionPass",
    "ParforPreLoweringPass",
    "NopythonRewrites",
    "AnnotateTypes",
    "DumpParforDiagnostics",
    "NoPythonSupportedFeatureValidation",
}


class _Pipeline(compiler.CompilerBase):  # type: ignore[misc]
    """Numba's passes less those that have nothing to do in code of scalars, vectors and loops (a third of the time)."""

    def define_pipelines(self) -> list[Any]:
        usual = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager = PassManager("edgellm kernel")
        for item, description in usual.passes:
            if item.__name__ not in UNNEEDED:
                manager.add_pass(item, description)
        manager.finalize()
        return [manager]


class _Unit:
    """A compiled function: Numba's result, its IR, and the units it calls."""

    def __init__(self) -> None:
        self.result: Any = None
        self.modules: dict[str, str] = {}
        self.calls: list[_Unit] = []

    def all_modules(self) -> dict[str, str]:
        """IR of this unit and of everything below it, by library name."""
        found = dict(self.modules)
        for unit in self.calls:
            found |= unit.all_modules()
        return found


class _FrontEnd:
    """Kernels and helpers to LLVM IR for one target; a helper is compiled once per argument types."""

    def __init__(self, target: Target):
        self.target = target
        self.forms: dict[int, Any] = {}
        self.open: list[_Unit] = []

    def compile(self, function: Callable[..., Any], args: tuple[types.Type, ...], result: types.Type | None) -> _Unit:
        """IR of a function for these argument types, with that of the helpers it calls."""
        unit = _Unit()
        namespace = {name: self.form(value) for name, value in namespace_of(function).items()}
        plain = unrolled(function, namespace)
        context = cpu_target.typing_context, cpu_target.target_context
        self.open.append(unit)
        try:
            unit.result = compiler.compile_extra(*context, plain, args, result, _flags(), {}, pipeline_class=_Pipeline)
        finally:
            self.open.pop()
        # Besides the function: Python builtins (min, max) that Numba compiles as functions of their own.
        library = unit.result.library
        for part in (library, *library._linking_libraries):
            if part.name != "nrt":
                unit.modules[part.name + str(id(part))] = str(part._final_module)
        return unit

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
            bound: Any = None
            signature: list[Any] = []
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
        compiled: dict[Any, _Unit] = {}

        def typer(context: Any, *args: Any) -> Any:
            args = tuple(unliteral(a) for a in args)
            if args not in compiled:
                compiled[args] = self.compile(helper.function, args, None)
            unit = compiled[args]

            def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                self.open[-1].calls.append(unit)
                return context.call_internal_no_propagate(builder, unit.result.fndesc, sig, values)[1]

            return unit.result.signature.return_type(*args), generate

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
    llvm.initialize_native_asmparser()
    model = {"reloc": "default", "codemodel": "jitdefault"} if jit else {"reloc": "pic", "codemodel": "small"}
    kind = llvm.Target.from_triple(target.triple)
    return kind.create_target_machine(cpu=target.cpu, features=target.features, opt=3, jit=jit, **model)


def _retarget(text: str, target: Target, layout: str) -> Any:
    """Parse IR text with its triple and data layout replaced (Numba writes them for the host)."""
    text = re.sub(r"^target (datalayout|triple) = .*$", "", text, flags=re.M)
    return llvm.parse_assembly(f'target datalayout = "{layout}"\ntarget triple = "{target.triple}"\n{text}')


def _optimise(module: Any, machine: Any) -> None:
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    # Kernels say themselves what is a vector: vectorising their scalar ends makes code larger and no faster.
    options.loop_vectorization = False
    options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def _check_symbols(name: str, module: Any) -> None:
    """Object code may need nothing from outside: no functions, no intrinsics that become library calls."""
    declared = [f.name for f in module.functions if f.is_declaration]
    outside = [d for d in declared if not d.startswith("llvm.") and d not in SYMBOLS_ALLOWED]
    outside += [d for d in declared if d.split(".")[1:2] and d.split(".")[1] in LIBRARY_CALLS]
    if outside:
        raise RuntimeError(f"kernel {name} calls {', '.join(sorted(outside))}, which cannot be linked")


class Compiler:
    """Compiles kernels for one target, keeping the helpers they share. `jit` False: position-independent, for a
    linker."""

    def __init__(self, target: Target, jit: bool = True):
        self.target = target
        self._front = _FrontEnd(target)
        self._machine = _machine(target, jit)

    def object_code(self, item: Kernel) -> bytes:
        """The kernel's object file."""
        return bytes(self._machine.emit_object(self._module(item)))

    def assembly(self, item: Kernel) -> str:
        """The kernel's assembly, for reading and for tests."""
        return str(self._machine.emit_assembly(self._module(item)))

    @global_compiler_lock  # type: ignore[untyped-decorator]
    def _module(self, item: Kernel) -> Any:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
        unit = self._front.compile(item.function, (types.int64,) * 4, types.void)
        layout = str(self._machine.target_data)
        entry = _wrapper(symbol(item.name), unit.result.fndesc.llvm_func_name)
        module = _retarget(entry, self.target, layout)
        for text in unit.all_modules().values():
            part = _retarget(text, self.target, layout)
            for function in part.functions:
                if not function.is_declaration:
                    function.linkage = "weak_odr"  # several libraries may hold the same builtin
            module.link_in(part)
        for function in module.functions:
            if not function.is_declaration and function.name != symbol(item.name):
                function.linkage = "internal"
                function.add_function_attribute("alwaysinline")
        module.verify()
        _optimise(module, self._machine)
        _check_symbols(item.name, module)
        return module
