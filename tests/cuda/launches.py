"""What the CUDA backend would launch, and what NVIDIA's compiler makes of it, without a GPU.

Run as a script in a process of its own, without the simulator: device memory is host memory that nobody touches, a
launch only notes the kernel, the types of its arguments and its grid, and each noted kernel is then compiled to PTX
and assembled to machine code. Prints JSON. `python -m tests.cuda.launches --cc 80 [--ops linear,attention]`."""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


copies = {"up": 0, "down": 0}


class HostArray(np.ndarray):
    """Host memory with the few methods of a device array that the backend uses."""

    def copy_to_host(self, target: np.ndarray | None = None, stream: Any = 0) -> np.ndarray:
        copies["down"] += 1
        return np.zeros(self.shape, self.dtype) if target is None else target

    def copy_to_device(self, source: Any, stream: Any = 0) -> None:
        copies["up"] += 1
        assert source.size <= self.size


def host_array(shape: Any, dtype: Any = np.float32, **_: Any) -> HostArray:
    return np.empty(shape, dtype).view(HostArray)


def host_copy(array: np.ndarray, **_: Any) -> HostArray:
    copies["up"] += 1
    return array.view(HostArray)


@dataclass(frozen=True)
class Launch:
    """One launch: which function on what types, how many blocks and threads."""

    kernel: Any
    argtypes: tuple[Any, ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.rpartition('.')[2]}.{self.kernel.__name__}"


class Recorder:
    """Stands in for the driver: `launches` grows with every kernel that the backend starts."""

    def __init__(self, cc: tuple[int, int]):
        from numba import cuda
        from numba.cuda import dispatcher

        self.cc, self.launches = cc, list[Launch]()
        dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=cc, name=b"none")
        dispatcher.CUDADispatcher.__getitem__ = lambda kernel, config: lambda *args: self._note(kernel, config, args)
        cuda.is_available = lambda: True
        cuda.device_array, cuda.pinned_array, cuda.to_device = host_array, host_array, host_copy
        cuda.synchronize = lambda: None
        cuda.current_context = lambda: types.SimpleNamespace(
            get_memory_info=lambda: (80 << 30, 80 << 30), device=dispatcher.get_current_device()
        )

    def _note(self, kernel: Any, config: Any, args: tuple[Any, ...]) -> None:
        from numba import typeof

        grid, block = (tuple(np.atleast_1d(c).tolist()) for c in config[:2])
        plain = (np.asarray(a) if isinstance(a, HostArray) else a for a in args)
        self.launches.append(Launch(kernel.py_func, tuple(typeof(a) for a in plain), grid, block))


@dataclass
class Compiled:
    """A kernel as PTX and machine code: what to look for in each."""

    label: str
    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    error: str = ""
    wide_loads: int = 0
    dp4a: int = 0
    doubles: int = 0
    loop: int = 0
    """Instructions of the longest loop, once through."""
    loop_dp4a: int = 0
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0


def load_assembler() -> None:
    """nvJitLink from its wheel, wherever that is installed."""
    import nvidia

    for folder in nvidia.__path__:
        for path in Path(folder).glob("*/lib/libnvJitLink.so*"):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def assemble(ptx: str, cc: tuple[int, int]) -> str:
    """What the assembler says about a kernel."""
    from cuda.bindings import nvjitlink

    options = [f"-arch=sm_{cc[0]}{cc[1]}", "-Xptxas=-v"]
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, ptx.encode(), len(ptx), "kernel")
        nvjitlink.complete(handle)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
    finally:
        nvjitlink.destroy(handle)
    return log.decode()


def hot_loop(ptx: str) -> list[str]:
    """The instructions between a label and the last jump back to it, for the longest such stretch."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.startswith("$L") and line.endswith(":")}
    jumps = [(labels[m[1]], i) for i, line in enumerate(lines) if (m := re.search(r"bra\S*\s+(\$L\w+);", line))]
    start, end = max(((a, b) for a, b in jumps if a < b), key=lambda p: p[1] - p[0], default=(0, 0))
    return [line for line in lines[start:end] if line.endswith(";") and not line.startswith((".", "{", "//"))]


def compile_launch(label: str, launch: Launch, cc: tuple[int, int]) -> Compiled:
    """PTX by numba, machine code by nvJitLink (as on a machine with a GPU)."""
    from numba import cuda

    done = Compiled(label, launch.name, launch.grid, launch.block)
    try:
        ptx = cuda.compile_ptx(launch.kernel, launch.argtypes, cc=cc)[0]
        log = assemble(ptx, cc)
    except Exception as error:  # any failure to compile is the finding
        done.error = f"{type(error).__name__}: {error}"[:600]
        return done
    done.wide_loads, done.dp4a = ptx.count("ld.global.v4"), ptx.count("dp4a.s32.s32")
    done.doubles = len(re.findall(r"\.f64", ptx))
    loop = hot_loop(ptx)
    done.loop, done.loop_dp4a = len(loop), sum(line.startswith("dp4a.") for line in loop)
    found = SPILLS.search(log)
    assert found, log
    done.stack, done.spills = int(found[1]), int(found[2]) + int(found[3])
    done.registers = int(re.search(r"Used (\d+) registers", log)[1])
    shared = re.search(r"(\d+) bytes smem", log)
    done.shared = int(shared[1]) if shared else 0
    return done


def cases(backend: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every op at the shapes of an 8B model; every weight type where a type makes another kernel."""
    from edgellm.backends.base import AttentionSpec, KVSpec, QTensor, RopeSpec, RouteSpec
    from edgellm.backends.cuda.unpack import UNPACK
    from edgellm.quants import QUANT_TABLE, GGMLType
    from tests.support.models import make_batch

    def array(*shape: int, dtype: str = "float32") -> Any:
        return backend._pool.take(shape, dtype)

    def weight(kind: GGMLType, *shape: int) -> Any:
        info = QUANT_TABLE[kind]
        raw = np.empty((*shape[:-1], shape[-1] // info.block_size * info.type_size), np.uint8)
        return backend.load(QTensor("w.weight", kind, shape, raw))

    dim, ffn, heads, kv_heads = 4096, 14336, 32, 8
    for kind in (*UNPACK, GGMLType.F16, GGMLType.BF16, GGMLType.F32):
        w = weight(kind, ffn, dim)
        for rows in (1, 2, 4, 8, 512):
            yield f"{kind.name} x{rows}", lambda w=w, rows=rows: backend.linear(array(rows, dim), w)
        experts, ids = weight(kind, 8, 64, dim), array(2, 2, dtype="int32")
        yield f"{kind.name} experts", lambda e=experts, i=ids: backend.expert_linear(array(2, dim), e, i)
        yield f"{kind.name} rows", lambda w=w: backend.embed(w, np.zeros(2, np.int32))
    norm = weight(GGMLType.F32, dim)
    yield "rms", lambda: backend.rms_norm(array(2, dim), norm, 1e-5)
    yield "layer", lambda: backend.layer_norm(array(2, dim), norm, norm, 1e-5)
    batch = make_batch([[0]], [40], [np.array([[1, 2]], np.int32)])
    rope = RopeSpec(128, True, np.ones((1, 64), np.float32), np.ones(1, np.float32))
    yield "rope", lambda: backend.rope(array(1, heads, 128), batch, rope)
    for head in (64, 128, 256):
        for kv_type in ("f16", "q8_0", "f32"):
            for group in (1, 4, 8):
                spec = KVSpec(kv_heads, head, head, kv_type, 32, 0)
                kv = backend.new_kv(spec, 4)
                label = f"attention {head} {kv_type} group {group}"
                if group == 4:
                    x = array(1, kv_heads, head)
                    yield f"store {head} {kv_type}", lambda kv=kv, x=x: backend.store_kv(kv, x, x, batch)
                q = array(1, kv_heads * group, head)
                yield label, lambda kv=kv, q=q: backend.attention(q, kv, batch, AttentionSpec(0.1, 9, 30.0))
    x = array(2, ffn)
    for kind_ in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "exp_rest", "swiglu_oai"):
        yield kind_, lambda kind_=kind_: backend.activate(kind_, x, x)
    yield "silu alone", lambda: backend.activate("silu", x)
    yield "add", lambda: backend.add(x, x, 0.5)
    yield "bias", lambda: backend.linear(array(1, dim), weight(GGMLType.F16, 64, dim), weight(GGMLType.F32, 64))
    yield "scale", lambda: backend.scale(x, 0.5, 30.0)
    yield "take", lambda: backend.take(x, batch.output_rows)
    for scoring in ("softmax", "softmax_topk", "sigmoid"):
        yield f"route {scoring}", lambda scoring=scoring: backend.route(array(2, 64), RouteSpec(8, scoring))
    heads = array(2, 4, 64)
    yield "columns", lambda: backend.columns(heads, 16, 48)
    yield "concat", lambda: backend.concat(heads, heads)
    yield "combine", lambda: backend.combine(array(2, 8, dim), array(2, 8))


def one_step(recorder: Recorder, backend: Any) -> dict[str, Any]:
    """A decode step of a Llama of two layers, its second one: copies, and the kernels of a layer in order."""
    from edgellm.loader import open_gguf
    from edgellm.models.registry import load_model
    from tests.support.goldens import DATA, Golden
    from tests.support.models import Runner

    run = Runner(load_model(open_gguf(Golden("llama", DATA / "goldens").path()), backend), backend, "f16")
    for _ in range(2):
        recorder.launches.clear()
        copies.update(up=0, down=0)
        run.run([1])
    names = [launch.name for launch in recorder.launches]
    first, second = (i for i, name in enumerate(names) if name == "attention.partial")
    return {"copies": copies, "launches": len(names), "layer": names[first:second]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cc", type=int, default=80)
    parser.add_argument("--only", default="", help="labels that hold this text")
    parser.add_argument("--step", action="store_true", help="a step's launches instead of compiled kernels")
    options = parser.parse_args()
    cc = divmod(options.cc, 10)
    load_assembler()
    recorder = Recorder(cc)
    from edgellm.backends.cuda.backend import CUDABackend

    backend = CUDABackend()
    if options.step:
        print(json.dumps(one_step(recorder, backend)))
        return
    done: dict[Any, Compiled] = {}
    for label, run in cases(backend):
        if options.only not in label:
            continue
        recorder.launches.clear()
        run()
        for launch in recorder.launches:
            key = launch.kernel, launch.argtypes
            if key not in done:
                done[key] = compile_launch(label, launch, cc)
    print(json.dumps([asdict(d) for d in done.values()]))


if __name__ == "__main__":
    main()
