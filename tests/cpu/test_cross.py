"""Kernels compiled for other machines: the assembly holds the dot-product instructions that are meant."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from edgellm.backends.cpu.jit import jit_disabled

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(jit_disabled(), reason="compiles"),
]

# The instruction set is chosen when simd.py is imported, so each target has a process of its own.
PROGRAM = """
import sys
from edgellm.backends.cpu.compiler import Compiler
from edgellm.backends.cpu.jit import Target
from edgellm.backends.cpu.matmul import linear_kernel
isa, triple, cpu = sys.argv[1:4]
compiler = Compiler(Target(isa, triple, cpu), jit=False)
for kernel in sys.argv[4:]:
    kind, panel = kernel.split("/")
    print("KERNEL", kernel)
    print(compiler.assembly(linear_kernel(kind, int(panel))))
"""
TARGETS = {
    "apple-m1": ("neon", "arm64-apple-macosx11.0.0", "sdot"),
    "neoverse-n1": ("neon", "aarch64-unknown-linux-gnu", "sdot"),
    "icelake-server": ("avx512", "x86_64-unknown-linux-gnu", "vpdpbusd"),
}


@pytest.mark.parametrize("cpu", TARGETS)
def test_dot_product_instructions(cpu):
    isa, triple, dot = TARGETS[cpu]
    kernels = ("Q4_K/8", "Q4_0/1")
    command = [sys.executable, "-c", PROGRAM, isa, triple, cpu, *kernels]
    done = subprocess.run(command, env={**os.environ, "EDGELLM_ISA": isa}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = re.split(r"^KERNEL (\S+)$", done.stdout, flags=re.M)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        # A tile has at least one for each of eight tokens, or for each of a block's eight words.
        assert len(re.findall(rf"\b{dot}\b", text)) >= 8, (cpu, name)
    assert len(parts) == 2 * len(kernels)
