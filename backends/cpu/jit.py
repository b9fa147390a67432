"""Kernels: plain Python functions compiled once per machine, kept on disk as object code, loaded without Numba.

    @kernel
    def scale(args: int, begin: int, end: int, scratch: int) -> None: ...

`args` is the address of an int64 array (addresses, sizes, float bits), `begin..end` the units of its work this call
does, `scratch` the address of this thread's own memory. A kernel uses int64, float32 and the Ops of simd.py, and calls
functions marked `@inline`; nothing else: no arrays, no exceptions, no library calls. `unroll.py` says which loops are
written out.

Compiling needs Numba (the front end) and takes about half a second a kernel; loading takes llvmlite only. The cache is
`<home>/kernels/<cpu>-<isa>-<versions>/<kernel>-<hash of its sources>.o` (a checksum, then the object), written by
rename, so several processes may compile at once and the package itself may be read-only.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.backends.cpu import simd
from edgellm.backends.cpu.unroll import namespace_of
from edgellm.config import home
from edgellm.errors import BackendUnavailable

__all__ = ["Inline", "Kernel", "Library", "Target", "host_target", "inline", "jit_disabled", "kernel"]

log = logging.getLogger(__name__)

DIGEST = 16
"""Bytes of checksum before the object code in a cache file."""
RUNS_TOO = {"avx512": ("avx2", "scalar"), "avx2": ("scalar",), "neon": ("scalar",)}
"""Instruction sets that a machine of another one can run as well."""
SYMBOLS_ALLOWED = {"memset", "memcpy", "memmove"}


def jit_disabled() -> bool:
    """True when kernels must run as plain Python (NUMBA_DISABLE_JIT=1)."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


class Inline:
    """A helper that becomes part of every kernel that calls it. Called from Python it is the plain function."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class Kernel:
    """One compiled function. Called from Python it is the plain function (the twin)."""

    def __init__(self, function: Callable[[int, int, int, int], None], name: str):
        self.function = function
        self.name = name
        self.__doc__ = function.__doc__

    def __call__(self, args: int, begin: int, end: int, scratch: int) -> None:
        self.function(args, begin, end, scratch)

    def __repr__(self) -> str:
        return f"Kernel({self.name})"

    @property
    def key(self) -> str:
        """Name and a hash of all that has a part in it: source files, and the constants that they take from others."""
        paths, constants = _parts(self.function)
        digest = hashlib.sha256(" ".join(sorted(constants)).encode())
        for path in sorted(paths):
            digest.update(_file_digest(path))
        return f"{self.name}-{digest.hexdigest()[:12]}"


def inline(function: Callable[..., Any]) -> Inline:
    """Decorator for helpers of kernels."""
    return Inline(function)


def kernel(function: Callable[[int, int, int, int], None], name: str | None = None) -> Kernel:
    """Decorator for kernels. A factory that closes over constants gives each variant its own `name`."""
    return Kernel(function, name or function.__name__)


@cache
def _file_digest(path: str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


def _parts(function: Callable[..., Any]) -> tuple[set[str], set[str]]:
    """Source files of a kernel and of what becomes part of it, and `name=value` of the constants they refer to."""
    here = Path(__file__).parent
    paths = {str(here / name) for name in ("jit.py", "compiler.py", "emit.py", "unroll.py")}
    paths |= {str(path) for path in here.glob("simd*.py")}
    constants: set[str] = set()
    pending, seen = [function], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        paths.add(current.__code__.co_filename)
        namespace = namespace_of(current)
        for name in current.__code__.co_names + current.__code__.co_freevars:
            value = namespace.get(name)
            if isinstance(value, Inline):
                pending.append(value.function)
            elif _is_plain(value):
                constants.add(f"{name}={value}")
    return paths, constants


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, (int, float, str, np.number))


class Target:
    """What to compile for: an LLVM triple, CPU name and feature string, and the instruction set our Ops emit."""

    def __init__(self, isa: str, triple: str = "", cpu: str = "", features: str = ""):
        self.isa, self.triple, self.cpu, self.features = isa, triple, cpu, features

    @property
    def label(self) -> str:
        """Folder name part: CPU, instruction set and a hash of the features."""
        digest = hashlib.sha256(f"{self.triple} {self.features}".encode()).hexdigest()[:8]
        return f"{self.cpu}-{self.isa}-{digest}"


@lru_cache(maxsize=1)
def host_target() -> Target:
    """This machine with `simd.ISA`; an instruction set other than the machine's best gets a plain CPU of that kind."""
    import llvmlite.binding as llvm

    triple = llvm.get_process_triple()
    if simd.detect_isa() == simd.ISA:
        features = llvm.get_host_cpu_features().flatten() if simd.host_features() else ""
        return Target(simd.ISA, triple, llvm.get_host_cpu_name(), features)
    generic = "x86-64" if triple.startswith("x86_64") else "generic"
    return Target(simd.ISA, triple, {"avx2": "x86-64-v3", "avx512": "icelake-server"}.get(simd.ISA, generic))


@lru_cache(maxsize=1)
def _versions() -> str:
    parts = [f"{p}={importlib.metadata.version(p)}" for p in ("numba", "llvmlite")]
    return hashlib.sha256(" ".join([sys.version, *parts]).encode()).hexdigest()[:8]


class Library:
    """The kernels of this process: compiles what the cache lacks, loads the rest, gives addresses."""

    def __init__(self, target: Target | None = None):
        self.target = target or host_target()
        self.folder = home() / "kernels" / f"{self.target.label}-{_versions()}"
        self._addresses: dict[str, int] = {}
        self._engines: list[Any] = []
        self._compiler: Any = None
        self._keeps = True

    def missing(self, kernels: Iterable[Kernel]) -> list[Kernel]:
        """Kernels that are neither loaded nor on disk."""
        wanted = {k.name: k for k in kernels if k.name not in self._addresses}
        return [k for k in wanted.values() if self._cached(k) is None]

    def load(self, kernels: Iterable[Kernel], progress: Callable[[int, int, str], None] | None = None) -> None:
        """Make the kernels callable. `progress(done, total, name)` is called around each one that must be compiled."""
        wanted = {k.name: k for k in kernels if k.name not in self._addresses}
        if not wanted or jit_disabled():
            return
        if simd.ISA not in (simd.detect_isa(), *RUNS_TOO.get(simd.detect_isa(), ())):
            raise BackendUnavailable(f"EDGELLM_ISA={simd.ISA} asks for instructions that this CPU does not have")
        found = {name: self._cached(item) for name, item in wanted.items()}
        objects = {name: code for name, code in found.items() if code is not None}
        todo = [item for name, item in wanted.items() if name not in objects]
        for done, item in enumerate(todo):
            if progress:
                progress(done, len(todo), item.name)
            objects[item.name] = self.object_code(item)
        if todo and progress:
            progress(len(todo), len(todo), "")
        self._link(objects)

    def object_code(self, item: Kernel) -> bytes:
        """The kernel's object file: from the cache, or compiled now and put there."""
        cached = self._cached(item)
        if cached is not None:
            return cached
        if self._compiler is None:
            from edgellm.backends.cpu.compiler import Compiler

            self._compiler = Compiler(self.target)
        code: bytes = self._compiler.object_code(item)
        try:
            self._keep(item, code)
        except OSError as error:
            if self._keeps:
                log.warning("kernels are compiled anew at every start: %s: %s", self.folder, error.strerror)
            self._keeps = False
        return code

    def _keep(self, item: Kernel, code: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.NamedTemporaryFile(dir=self.folder, suffix=".tmp", delete=False)  # noqa: SIM115
        try:
            with file:
                file.write(_digest(code) + code)
            os.replace(file.name, self.folder / f"{item.key}.o")
        except BaseException:  # a full disk, Ctrl-C: nothing half-written stays
            with suppress(OSError):
                os.unlink(file.name)
            raise

    def _cached(self, item: Kernel) -> bytes | None:
        """Object code on disk; None when it is not there or damaged (a bad object would end the process)."""
        try:
            data = (self.folder / f"{item.key}.o").read_bytes()
        except OSError:
            return None
        return data[DIGEST:] if data[:DIGEST] == _digest(data[DIGEST:]) and len(data) > DIGEST else None

    def address(self, item: Kernel) -> int:
        """Where the compiled kernel is in memory."""
        if item.name not in self._addresses:
            self.load([item])
        return self._addresses[item.name]

    def address_or_zero(self, item: Kernel) -> int:
        """As `address`; 0 when kernels run as plain Python."""
        return 0 if jit_disabled() else self.address(item)

    def function(self, item: Kernel, keep_gil: bool = False) -> Callable[[int, int, int, int], None]:
        """The compiled kernel as a Python callable (ctypes; drops the GIL unless it is to keep it: for what is shorter
        than another thread's turn), or the plain one when JIT is disabled."""
        if jit_disabled():
            return item
        kind = ctypes.PYFUNCTYPE if keep_gil else ctypes.CFUNCTYPE
        function: Any = kind(None, *[ctypes.c_int64] * 4)(self.address(item))
        function.library = self  # The code lives as long as the engine that holds it.
        result: Callable[[int, int, int, int], None] = function
        return result

    def _link(self, objects: dict[str, bytes]) -> None:
        import llvmlite.binding as llvm

        engine = _new_engine()  # MCJIT resolves nothing in objects added after the first finalize_object.
        self._engines.append(engine)
        for code in objects.values():
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        for name in objects:
            self._addresses[name] = engine.get_function_address(symbol(name))


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()[:DIGEST]


def symbol(name: str) -> str:
    """A kernel's name in object code."""
    return "edgellm_" + re.sub(r"\W", "_", name)


def _new_engine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
