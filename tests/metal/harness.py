"""Stands where `mx.fast.metal_kernel` stands, with its signature: MLX writes the Metal source, g++ builds it, the grid
runs on this CPU. So wrappers, grids, template arguments and shapes are under test as they ship.

Modes: "plain"; "trace" (every load and store of a lane is checked: bounds, races, uninitialised reads, alignment, and
counted); "asan" (AddressSanitizer and UBSan; the process must start with `sanitizer_environment()`)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.metal.unit import KERNEL_FLAGS, SHIM, BuildError, check_spaces, generated, translation_unit

__all__ = ["BuildError", "CpuKernel", "check_spaces", "maker", "sanitizer_environment"]

MLX_KERNEL = mx.fast.metal_kernel
COMMON = ["-g", "-O1", "-fPIC", "-ffp-contract=off"]
UBSAN = "-fsanitize=alignment,bounds,shift,integer-divide-by-zero"
MODES = {
    "plain": {"kernel": [], "runtime": [], "link": []},
    # No -fsanitize at the link: trace_hooks.h has the functions these call.
    "trace": {
        "kernel": ["-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0", UBSAN],
        "runtime": ["-DMSL_TRACE"],
        "link": ["-Wl,-z,defs"],
    },
    "asan": {
        "kernel": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
        "runtime": ["-fsanitize=address"],
        "link": ["-fsanitize=address,undefined"],
    },
}


def sanitizer_environment() -> dict[str, str]:
    """The environment in which a Python child can load an "asan" kernel."""
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    extra = {"LD_PRELOAD": os.path.realpath(found), "ASAN_OPTIONS": "detect_leaks=0"}
    return {**os.environ, **extra, "UBSAN_OPTIONS": "print_stacktrace=1"}


def _build_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"edgellm-metal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _gxx(arguments: list[str]) -> str:
    run = subprocess.run(["g++", *arguments], capture_output=True, text=True)
    if run.returncode:
        raise BuildError(run.stderr)
    return run.stderr


def _cached(key: object, suffix: str, make) -> Path:
    """<hash of key><suffix> in the build folder, made by make(path) unless there."""
    path = _build_folder() / (hashlib.sha256(repr(key).encode()).hexdigest()[:16] + suffix)
    if not path.exists():
        part = path.with_name(path.name + f".{os.getpid()}")
        make(part)
        part.rename(path)
    return path


def _raw(a: mx.array) -> np.ndarray:
    """The bytes of an MLX array, row-contiguous, as numpy uint8."""
    return np.array(mx.contiguous(a.reshape(-1)).view(mx.uint8)) if a.size else np.zeros(0, np.uint8)


class CpuKernel:
    """One kernel. After a call: `findings` (what the checks saw), `counts` (reads per byte of each input, trace mode),
    `warnings` of g++, `code` (the translation unit)."""

    def __init__(self, name, input_names, output_names, source, header="", mode="plain", order=0, seed=0, **options):
        self.mlx = MLX_KERNEL(
            name=name,
            input_names=input_names,
            output_names=output_names,
            source=source,
            header=header,
            **options,
        )
        self.name, self.input_names, self.output_names = name, list(input_names), list(output_names)
        self.source, self.header, self.mode, self.order, self.seed = source, header, mode, order, seed
        self.findings: list[str] = []
        self.counts: dict[str, np.ndarray] = {}
        self.warnings = ""
        self.code = ""

    def _library(self, function: str, text: str) -> tuple[Path, list[str]]:
        self.code, buffers = translation_unit(function, text, self.header, self.source, self.name)
        mode = MODES[self.mode]
        sources = [(SHIM / f).read_text() for f in sorted(os.listdir(SHIM))]

        def runtime(path: Path) -> None:
            flags = [*COMMON, "-std=c++17", *mode["runtime"]]
            _gxx([*flags, "-I", str(SHIM), "-c", str(SHIM / "runtime.cpp"), "-o", str(path)])

        def library(path: Path) -> None:
            cpp = path.with_name(path.name.split(".")[0] + ".cpp")
            cpp.write_text(self.code)
            warnings = _gxx([*COMMON, *KERNEL_FLAGS, *mode["kernel"], "-c", str(cpp), "-o", f"{path}.o"])
            cpp.with_suffix(".log").write_text(warnings)
            _gxx(["-shared", *mode["link"], f"{path}.o", str(runtime_object), "-o", str(path)])
            os.remove(f"{path}.o")

        runtime_object = _cached([sources, COMMON, mode], ".o", runtime)
        path = _cached([sources, self.code, COMMON, KERNEL_FLAGS, mode], ".so", library)
        self.warnings = path.with_suffix(".log").read_text()
        return path, buffers

    def _buffers(self, inputs, output_shapes, output_dtypes, init_value) -> dict[str, np.ndarray]:
        data: dict[str, np.ndarray] = {}
        for name, a in zip(self.input_names, inputs, strict=True):
            data[name] = _raw(a)
            strides = np.cumprod([1, *a.shape[:0:-1]])[::-1] if a.ndim else []
            data[name + "_shape"] = np.array(a.shape, np.int32).view(np.uint8)
            data[name + "_strides"] = np.array(strides, np.int64).view(np.uint8)
            data[name + "_ndim"] = np.array([a.ndim], np.int32).view(np.uint8)
        for name, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True):
            size = int(np.prod(shape)) * dtype.size
            # MLX does not clear outputs: NaN bytes, unless the launch asks for a value.
            data[name] = (
                np.full(size, 0xFF, np.uint8) if init_value is None else _raw(mx.full(shape, init_value, dtype))
            )
        return data

    def __call__(self, inputs, output_shapes, output_dtypes, grid, threadgroup, template=(), init_value=None, **unused):
        inputs = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        call = {"inputs": inputs, "output_shapes": output_shapes, "output_dtypes": output_dtypes, "grid": grid}
        call |= {"threadgroup": threadgroup, "template": list(template), "init_value": init_value}
        path, names = self._library(*generated(self.mlx, call))
        data = self._buffers(inputs, output_shapes, output_dtypes, init_value)
        arrays = [np.ascontiguousarray(data[k]) for k in names]
        self._launch(path, names, arrays, grid, threadgroup)
        out = dict(zip(names, arrays, strict=True))
        return [
            mx.array(out[k]).view(d).reshape(s)
            for k, s, d in zip(self.output_names, output_shapes, output_dtypes, strict=True)
        ]

    def _launch(self, path: Path, names: list[str], arrays: list[np.ndarray], grid, threadgroup) -> None:
        library = ctypes.CDLL(str(path))
        library.msl_report.restype = ctypes.c_char_p
        n = len(names)
        bad = library.msl_launch(
            n,
            (ctypes.c_char_p * n)(*(k.encode() for k in names)),
            (ctypes.c_void_p * n)(*(a.ctypes.data for a in arrays)),
            (ctypes.c_size_t * n)(*(a.nbytes for a in arrays)),
            (ctypes.c_int * n)(*(k in self.output_names for k in names)),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*threadgroup),
            self.order,
            self.seed,
        )
        report = library.msl_report().decode().splitlines() if bad else []
        self.findings += [_placed(path, line) for line in report]
        if self.mode == "trace":
            for i, k in enumerate(names):
                self.counts[k] = np.zeros(arrays[i].nbytes, np.uint16)
                library.msl_counts(i, self.counts[k].ctypes.data_as(ctypes.c_void_p))


def _placed(path: Path, finding: str) -> str:
    """A finding with its program counter turned into file:line."""
    kind, pc, text = finding.split("\t", 2)
    if pc != "0":
        where = subprocess.run(["addr2line", "-e", str(path), "0x" + pc], capture_output=True, text=True).stdout
        place = Path(where.split(" (")[0].strip()).name
        text = text if text.startswith(place) else f"{place}: {text}"
    return f"{kind}: {text}"


def maker(made: list[CpuKernel] | None = None, **fixed):
    """A stand-in for mx.fast.metal_kernel with a mode and lane order set; `made` collects the kernels."""

    def make(**arguments) -> CpuKernel:
        kernel = CpuKernel(**arguments, **fixed)
        if made is not None:
            made.append(kernel)
        return kernel

    return make
