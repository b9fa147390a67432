"""The NEON kernels on an emulated ARM CPU: whole tiny models, compiled for Neoverse N1, run by qemu-aarch64.

    apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
    EDGELLM_ISA=neon NUMBA_DISABLE_JIT=1 python tests/cpu/aarch64.py MODEL.gguf ... [--ids N]

A forward pass of N tokens is recorded and run as plain Python (the twins); then the same tape, with the same memory,
runs in qemu from cross-compiled object code. Prints the largest difference of the logits and exits 1 above 1e-3.
"""

from __future__ import annotations

import argparse
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.backends.base import Batch, KVSpec
from edgellm.backends.cpu import simd
from edgellm.backends.cpu.backend import CPUBackend
from edgellm.backends.cpu.jit import Kernel, Target, jit_disabled, symbol
from edgellm.backends.cpu.tape import Tape
from edgellm.loader import open_gguf
from edgellm.models.registry import load_model

TARGET = Target("neon", "aarch64-unknown-linux-gnu", "neoverse-n1")
TOLERANCE = 1e-3


def mappings(pointers: set[int]) -> list[tuple[int, int]]:
    """(address, size) of this process's memory mappings that hold any of the pointers."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) r", line)
        if match and "[v" not in line:
            start, end = (int(x, 16) for x in match.groups())
            if any(start <= p < end for p in pointers):
                found.append((start, end - start))
    return found


def snapshot(tape: Tape, path: Path) -> None:
    """Write what aarch64.c reads: memory, ops, where the result is."""
    calls = list(tape.calls())
    pointers = {args for _, args, _ in calls}
    values = {v for v in tape.arguments.tolist() if v > 1 << 20}
    pointers |= values
    # A cell may point further (partial results of attention).
    pointers |= {int(simd.load_i64(v)) for v in values if mappings({v})}
    assert tape.output is not None
    with path.open("wb") as file:
        regions = mappings({p for p in pointers if p > 1 << 20})
        file.write(struct.pack("<q", len(regions)))
        for address, size in regions:
            file.write(struct.pack("<qq", address, size) + simd.view(address, np.uint8, size).tobytes())
        file.write(struct.pack("<qq", len(calls), tape.scratch))
        for _, args, units in calls:
            file.write(struct.pack("<qq", args, units))
        file.write(struct.pack("<qq", tape.output.ctypes.data, tape.output.nbytes))


def build(kernels: list[Kernel], folder: Path) -> Path:
    """A static ARM program that runs these kernels in this order."""
    os.environ["NUMBA_DISABLE_JIT"] = "0"  # read when Numba is imported, which is now
    from edgellm.backends.cpu.compiler import Compiler

    cross = Compiler(TARGET, jit=False)
    objects = []
    for name, item in {k.name: k for k in kernels}.items():
        objects.append(folder / f"{name}.o")
        objects[-1].write_bytes(cross.object_code(item))
    lines = ["#include <stdint.h>", "typedef void kernel(int64_t, int64_t, int64_t, int64_t);"]
    lines += [f"extern kernel {symbol(k.name)};" for k in kernels]
    lines.append(f"kernel *const edgellm_tape[] = {{{', '.join(symbol(k.name) for k in kernels)}}};")
    (folder / "tape.c").write_text("\n".join(lines))
    program = folder / "run"
    sources = [Path(__file__).with_suffix(".c"), folder / "tape.c", *objects]
    subprocess.run(["aarch64-linux-gnu-gcc", "-O1", "-static", "-o", program, *sources], check=True)
    return program


class Recorder(CPUBackend):
    """Keeps the tape and the snapshot of the one pass it runs."""

    path: Path
    tape: Tape

    def _run(self, tape: Tape, batch: Batch) -> None:
        tape.load(batch, 0)
        snapshot(tape, self.path)
        self.tape = tape
        tape.run_plain()


def compare(model_path: Path, n: int) -> float:
    """Largest difference between the twins' logits and qemu's."""
    with tempfile.TemporaryDirectory() as name, open_gguf(model_path) as gguf:
        folder = Path(name)
        backend = Recorder(threads=1)
        backend.path = folder / "memory"
        model: Any = load_model(gguf, backend)
        c = model.config
        specs = [KVSpec(c.n_kv_heads, c.k_dim, c.v_dim, "f16", 32, c.group_of(i)) for i in range(c.n_layers)]
        kv = [backend.new_kv(spec, 3) for spec in specs]
        rows = np.arange(n, dtype=np.int32)
        table = np.ones((1, 1), np.int32)
        tables = tuple(table for _ in c.cache_groups)
        ids = np.random.default_rng(0).integers(0, c.vocab_size, n).astype(np.int32)
        starts, length = np.array([0, n], np.int32), np.array([n], np.int32)
        batch = Batch(ids, rows, starts, length, tables, rows, np.zeros(n, np.int32))
        expected = backend.execute(lambda b: model.forward(b, kv), batch)
        program = build(backend.tape.kernels, folder)
        done = subprocess.run(["qemu-aarch64", program, backend.path], check=True, stdout=subprocess.PIPE)
        found = np.frombuffer(done.stdout, np.float32).reshape(expected.shape)
        return float(np.abs(found - expected).max())


def main() -> None:
    """Compare every model given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--ids", type=int, default=2)
    args = parser.parse_args()
    if simd.ISA != "neon" or not jit_disabled():
        parser.error("set EDGELLM_ISA=neon and NUMBA_DISABLE_JIT=1")
    worst = 0.0
    for path in args.models:
        os.environ["NUMBA_DISABLE_JIT"] = "1"
        difference = compare(path, args.ids)
        worst = max(worst, difference)
        print(f"{path.name}: {args.ids} tokens, largest difference {difference:.2e}", flush=True)
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
