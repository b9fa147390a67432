"""Backends: the op set that models are written in, and one package per kind of machine.

Installed as `edgellm.backends` (see `package-dir` in pyproject.toml).
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from edgellm.errors import BackendUnavailable

if TYPE_CHECKING:
    from edgellm.backends.base import Backend

if not __name__.startswith("edgellm."):
    raise ImportError("import edgellm.backends instead: pyproject.toml maps this folder (pip install -e .)")

__all__ = ["NAMES", "create", "default_name", "memory_limit"]

_CLASSES = {
    "cpu": ("edgellm.backends.cpu.backend", "CPUBackend"),
    "metal": ("edgellm.backends.metal.backend", "MetalBackend"),
    "cuda": ("edgellm.backends.cuda.backend", "CUDABackend"),
    "reference": ("edgellm.backends.reference", "ReferenceBackend"),
}

NAMES = tuple(_CLASSES)
Progress = Callable[[int, int, str], None]


def default_name() -> str:
    """What `auto` stands for: metal on an Apple Silicon Mac, else cpu."""
    return "metal" if sys.platform == "darwin" and platform.machine() == "arm64" else "cpu"


def create(name: str = "auto", threads: int | None = None, progress: Progress | None = None) -> Backend:
    """A backend by name; its modules are imported here and not before. `threads` (None: physical cores) and
    `progress(done, total, name)`, which hears of kernels that must be compiled, are for the CPU backend; the others
    ignore them.

    Raises BackendUnavailable with the reason: unknown name, not built yet, or a library or device that is missing.
    """
    name = default_name() if name == "auto" else name
    if name not in _CLASSES:
        raise BackendUnavailable(f"no backend named {name!r}; there are: auto, {', '.join(NAMES)}")
    module_name, class_name = _CLASSES[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == module_name:
            raise BackendUnavailable(f"the {name} backend is not part of this version of edgellm") from error
        raise BackendUnavailable(f"the {name} backend needs the package {error.name}, which is not here") from error
    backend_class = getattr(module, class_name)
    backend: Backend = backend_class(threads=threads, progress=progress) if name == "cpu" else backend_class()
    return backend


def memory_limit(name: str = "auto") -> int | None:
    """Most bytes the device of a backend lets one process hold (as `Backend.memory_limit`), without making the backend;
    None where only the machine's memory counts, or where it cannot run."""
    if (default_name() if name == "auto" else name) != "metal":
        return None
    try:
        limits = importlib.import_module("edgellm.backends.metal.limits")
    except ModuleNotFoundError:
        return None
    return limits.limits_of(limits.device_info()).wired or None
