"""`edgellm doctor`: this machine, the libraries, and which backends can run here, with the reason where one cannot."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Any

import click

from edgellm.cli.machine import default_threads
from edgellm.cli.opening import note
from edgellm.cli.options import json_option
from edgellm.cli.show import size_text
from edgellm.errors import BackendUnavailable, EdgeLLMError

__all__ = ["doctor", "examine"]

_LIBRARIES = (
    *("numpy", "numba", "llvmlite", "gguf", "tokenizers", "sentencepiece", "jinja2", "llguidance"),
    *("starlette", "uvicorn", "pydantic", "mlx", "numba-cuda"),
)
_FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "avx512bf16", "amx-int8", "avxvnni"),
    *("neon", "dotprod", "i8mm", "bf16", "sve"),
)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backend(name: str) -> str | None:
    """None when the backend can be made, else why not."""
    from edgellm import backends

    try:
        backends.create(name).close()
    except BackendUnavailable as error:
        return str(error)
    return None


def examine(threads: int | None) -> dict[str, Any]:
    """Everything `doctor` reports. Takes about 1 GiB of memory and a few seconds for the bandwidth."""
    import llvmlite.binding as llvm
    import psutil

    from edgellm import __version__
    from edgellm.backends.cpu import simd
    from edgellm.backends.cpu.bandwidth import measure_bandwidth
    from edgellm.config import home

    used = threads or default_threads()
    features = simd.host_features()
    backends = {name: _backend(name) for name in ("cpu", "metal", "cuda", "reference")}
    # Read before the bandwidth test takes its own gigabyte.
    runtime_bytes = psutil.Process().memory_info().rss
    return {
        "edgellm": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": llvm.get_host_cpu_name(),
        "isa": simd.ISA,
        "features": [name for name in _FEATURES if name in features],
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cores": os.cpu_count(),
        "threads": used,
        "memory_bytes": psutil.virtual_memory().total,
        "memory_free_bytes": psutil.virtual_memory().available,
        "runtime_bytes": runtime_bytes,
        "bandwidth_gb_s": round(measure_bandwidth(used) / 1e9, 1),
        "home": str(home()),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "backends": {name: {"available": reason is None, "reason": reason} for name, reason in backends.items()},
    }


def _warm() -> None:
    from edgellm.backends.cpu.catalog import all_kernels
    from edgellm.backends.cpu.jit import Library
    from edgellm.cli.compile_bar import CompileBar

    bar = CompileBar()
    Library().load(all_kernels(), bar)
    note(f"kernels are ready (compiled for {bar.seconds:.1f} s)")


def _metal() -> None:
    """Check and time the Metal backend; exit 1 when a kernel is wrong."""
    from edgellm import backends

    backends.create("metal").close()
    import mlx.core as mx

    from edgellm.backends.metal import selftest

    info = mx.device_info()
    facts = (f"{key} {info[key]}" for key in sorted(info))
    click.echo(f"mlx {_version('mlx')} on {platform.platform()}: {', '.join(facts)}")
    click.echo(f"bandwidth    {selftest.copy_bandwidth():.1f} GB/s")
    click.echo(f"tokens/s     {_demo_speed()}")
    if not mx.metal.is_available():
        click.echo("no Metal device here: the kernels cannot be checked, models run on plain MLX ops")
        return
    wrong = 0
    for check in selftest.check_kernels():
        wrong += not check.passed
        error = check.error if isinstance(check.error, str) else f"error {check.error:.1e}"
        click.echo(f"{'ok   ' if check.passed else 'WRONG'} {check.name:<24} {error}")
    for name, speed in selftest.kernel_speeds():
        click.echo(f"one row {name:<8} {speed:7.1f} GB/s of weights")
    if wrong:
        raise EdgeLLMError(f"{wrong} Metal kernels are wrong on this device; please report the lines above")


def _demo_speed() -> str:
    """Tokens/s of the demo model on the Metal backend, where it was fetched."""
    from edgellm.errors import ModelNotFound
    from edgellm.hub import store
    from edgellm.measure.pair import decode_speed

    try:
        path = store.find("demo").path
    except ModelNotFound:
        return "not measured: `edgellm pull demo` first"
    return f"{decode_speed(path, backend='metal'):.1f} (demo model)"


@click.command()
@click.option("--backend", type=click.Choice(["metal"]), help="Check every kernel of this backend and time it.")
@click.option("--warm", is_flag=True, help="Compile all kernels now, so that no later start has to.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads for the bandwidth test.")
@json_option
def doctor(backend: str | None, warm: bool, threads: int | None, as_json: bool) -> None:
    """Describe this machine: CPU features, cores, memory, measured bandwidth, libraries, backends."""
    if backend:
        _metal()
        return
    if warm:
        _warm()
    facts = examine(threads)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for key in ("edgellm", "python", "system", "home"):
        click.echo(f"{key:<12} {facts[key]}")
    click.echo(f"{'cpu':<12} {facts['cpu']}, kernels: {facts['isa']}, features: {' '.join(facts['features'])}")
    click.echo(f"{'cores':<12} {facts['cores']} physical, {facts['logical_cores']} logical, {facts['threads']} used")
    memory, free = size_text(facts["memory_bytes"]), size_text(facts["memory_free_bytes"])
    click.echo(f"{'memory':<12} {memory}, {free} free; edgellm itself takes {size_text(facts['runtime_bytes'])}")
    click.echo(f"{'bandwidth':<12} {facts['bandwidth_gb_s']} GB/s read by {facts['threads']} threads")
    there = [f"{name} {version}" for name, version in facts["libraries"].items() if version]
    click.echo(f"{'libraries':<12} {', '.join(there)}")
    for name, state in facts["backends"].items():
        click.echo(f"{name:<12} {'can run' if state['available'] else 'cannot run: ' + state['reason']}")
