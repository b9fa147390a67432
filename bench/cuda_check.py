"""One command for a machine with an NVIDIA GPU: checks every kernel, then measures.

    python bench/cuda_check.py [--quick] [--shapes 1b,8b]

Needs numpy, numba, numba-cuda and this repository, not even an install. First each kernel against its definition
(dequantise and multiply), then device bandwidth and half-precision matmul rate, then decode and a prompt of 512 for
models of random weights in the shapes of 1B and 8B Llamas. Prints a table, and one JSON line at the end. Has not run
on real hardware yet: figures of the first run belong in bench/LOG.md with the card's name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"1b": (2048, 16, 32, 8, 8192, 128256), "8b": (4096, 32, 32, 8, 14336, 128256)}
"""dim, layers, heads, kv heads, ffn, vocabulary."""


def use_repository() -> None:
    """Make `edgellm.backends` and `edgellm.models` importable from a checkout that is not installed."""
    sys.path.insert(0, str(ROOT))
    for name in ("backends", "models"):
        folder = ROOT / name
        spec = importlib.util.spec_from_file_location(
            f"edgellm.{name}", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec and spec.loader
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


use_repository()

from edgellm.backends import dequant  # noqa: E402
from edgellm.backends.base import Batch, KVSpec, QTensor  # noqa: E402
from edgellm.backends.cuda.backend import CUDABackend  # noqa: E402
from edgellm.backends.cuda.unpack import UNPACK  # noqa: E402
from edgellm.models.config import ModelConfig, RopeConfig  # noqa: E402
from edgellm.models.llama import Llama  # noqa: E402
from edgellm.models.tensors import Tensors  # noqa: E402
from edgellm.quants import QUANT_TABLE, GGMLType  # noqa: E402

SCALE_AT = {"Q5_K": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
"""Byte offsets of a block's float16 scales, where they are not just (0,)."""


def random_blocks(kind: GGMLType, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 (n, row_bytes) of random quants with small scales."""
    info = QUANT_TABLE[kind]
    raw = rng.integers(0, 256, (n, k // info.block_size, info.type_size), dtype=np.uint8)
    if kind is GGMLType.MXFP4:
        raw[..., 0] = 120
        return raw.reshape(n, -1)
    for at in SCALE_AT.get(kind.name, (0,)):
        raw[..., at : at + 2] = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    return raw.reshape(n, -1)


class RandomSource(Mapping[str, QTensor]):
    """Tensors of a Llama of random weights, made when asked for; equal shapes share their bytes on the host."""

    def __init__(self, shape: tuple[int, ...]):
        self.dim, self.layers, self.heads, self.kv_heads, self.ffn, self.vocab = shape
        self._made: dict[tuple[int, int, str], np.ndarray] = {}

    def _shape(self, name: str) -> tuple[int, int, GGMLType]:
        kv = self.dim // self.heads * self.kv_heads
        rows = {"attn_k": (kv, self.dim), "attn_v": (kv, self.dim), "ffn_down": (self.dim, self.ffn)}
        rows |= {"ffn_gate": (self.ffn, self.dim), "ffn_up": (self.ffn, self.dim), "token_embd": (self.vocab, self.dim)}
        part = name.removesuffix(".weight").split(".")[-1]
        n, k = rows.get(part, (self.dim, self.dim))
        six = part == "token_embd" or (part in ("attn_v", "ffn_down") and int(name.split(".")[1]) % 2 == 0)
        return n, k, GGMLType.Q6_K if six else GGMLType.Q4_K

    def __getitem__(self, name: str) -> QTensor:
        if name == "output.weight" or "bias" in name or name == "rope_freqs.weight":
            raise KeyError(name)
        if name.endswith("norm.weight"):
            return QTensor(name, GGMLType.F32, (self.dim,), np.ones(self.dim, np.float32).view(np.uint8))
        n, k, kind = self._shape(name)
        key = (n, k, kind.name)
        if key not in self._made:
            self._made[key] = random_blocks(kind, n, k, np.random.default_rng(0))
        return QTensor(name, kind, (n, k), self._made[key])

    def __contains__(self, name: object) -> bool:
        try:
            self[str(name)]
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def check_kernels(gpu: CUDABackend) -> list[str]:
    """Names of types whose products differ from dequantise and multiply."""
    from numba import cuda

    bad, rng = [], np.random.default_rng(1)
    for kind in [*UNPACK, GGMLType.F16]:
        for rows, n, k in ((1, 5, 256), (3, 7, 512), (9, 65, 256)):
            if kind is GGMLType.F16:
                raw = rng.standard_normal((n, k)).astype(np.float16).view(np.uint8)
            else:
                raw = random_blocks(kind, n, k, rng)
            q = rng.integers(-127, 128, (rows, k // 32, 32))
            q[..., 0] = 127  # rounding to 8 bits leaves these rows as they are
            x = (q * rng.uniform(0.01, 0.02, (rows, k // 32, 1))).astype(np.float32).reshape(rows, k)
            array = gpu._pool.take((rows, k))
            array.data = cuda.to_device(x.reshape(-1))
            y = gpu.linear(array, gpu.load(QTensor("w.weight", kind, (n, k), raw)))
            got = y.data.copy_to_host().reshape(rows, n)
            gpu._quantised.clear()
            expected = x.astype(np.float64) @ dequant.dequantise(raw, kind).astype(np.float64).T
            error = ((got - expected) ** 2).mean() / (expected**2).mean()
            if not error < 1e-9:
                bad.append(f"{kind.name} {rows}x{n}x{k}: {error:.1e}")
    return bad


def seconds(run, repeats: int = 5) -> float:
    """Best of some runs, synchronised."""
    from numba import cuda

    times = []
    for _ in range(repeats):
        cuda.synchronize()
        start = time.perf_counter()
        run()
        cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def device_bandwidth() -> float:
    """GB/s of a device-to-device copy of 512 MiB, read and write counted."""
    from numba import cuda

    n = 1 << 27
    a, b = cuda.device_array(n, np.float32), cuda.device_array(n, np.float32)
    b.copy_to_device(a)
    return 2 * a.nbytes / seconds(lambda: b.copy_to_device(a)) / 1e9


def half_rate() -> float | None:
    """TFLOP/s of a half-precision matmul through cupy or torch, None without either."""
    n = 4096
    try:
        import cupy

        a = cupy.ones((n, n), cupy.float16)
        a @ a
        return 2 * n**3 / seconds(lambda: a @ a) / 1e12
    except ImportError:
        pass
    try:
        import torch

        t = torch.ones((n, n), dtype=torch.float16, device="cuda")
        t @ t
        return 2 * n**3 / seconds(lambda: (t @ t, torch.cuda.synchronize())) / 1e12
    except ImportError:
        return None


def batch(start: int, n: int, table: np.ndarray) -> Batch:
    return Batch(
        ids=np.arange(n, dtype=np.int32) + 7,
        positions=np.arange(start, start + n, dtype=np.int32),
        seq_starts=np.array([0, n], np.int32),
        context_lens=np.array([start + n], np.int32),
        block_tables=(table,),
        output_rows=np.array([n - 1], np.int32),
        rope_variants=np.zeros(n, np.int32),
    )


def measure_model(gpu: CUDABackend, name: str) -> dict[str, float]:
    """tok/s of decode at depth 512 and of a prompt of 512, and the weight bytes a token reads."""
    dim, layers, heads, kv_heads, ffn, vocab = shape = SHAPES[name]
    head = dim // heads
    config = ModelConfig(
        *("llama", layers, dim, heads, kv_heads, head, head, ffn, vocab, 8192, 1e-5),
        rope=RopeConfig(n_dims=head, base=500000.0),
    )
    source = RandomSource(shape)
    model = Llama(config, Tensors(source, gpu))
    spec = KVSpec(kv_heads, head, head, "f16", 32, 0)
    kv = [gpu.new_kv(spec, 40) for _ in range(layers)]
    table = np.arange(1, 40, dtype=np.int32)[None]

    def run(start: int, n: int) -> None:
        gpu.execute(lambda b: model.forward(b, kv), batch(start, n, table))

    run(0, 512)
    run(512, 1)
    prompt = seconds(lambda: run(0, 512), 3)
    decode = seconds(lambda: [run(512 + i, 1) for i in range(16)], 3) / 16
    weights = sum(w.data.nbytes for w in model_weights(model))
    flops = 2 * 512 * weights / 0.5625
    return {"pp512": 512 / prompt, "tg": 1 / decode, "gb_s": weights / decode / 1e9, "tflops": flops / prompt / 1e12}


def model_weights(model: Llama) -> list:
    """Every weight on the device, once."""
    held = {id(w): w for w in vars(model).values() if hasattr(w, "kind")}
    for block in model.blk:
        for part in vars(block).values():
            held |= {id(w): w for w in vars(part).values() if hasattr(w, "kind")}
    return list(held.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="kernel checks only")
    parser.add_argument("--shapes", default="1b,8b")
    options = parser.parse_args()
    from numba import cuda

    gpu = CUDABackend()
    bad = check_kernels(gpu)
    print(f"kernels: {'all right' if not bad else 'WRONG: ' + '; '.join(bad)}", flush=True)
    result: dict[str, object] = {"wrong": bad}
    if not options.quick:
        card = cuda.get_current_device().name
        card = card.decode() if isinstance(card, bytes) else card
        bandwidth, rate = device_bandwidth(), half_rate()
        print(f"{card}: {bandwidth:.0f} GB/s, half-precision matmul {rate or float('nan'):.0f} TFLOP/s", flush=True)
        result |= {"card": card, "bandwidth_gb_s": bandwidth, "half_tflops": rate}
        for name in options.shapes.split(","):
            figures = measure_model(gpu, name)
            result[name] = figures
            print(
                f"{name}: decode {figures['tg']:.1f} tok/s = {figures['gb_s'] / bandwidth:.0%} of bandwidth, "
                f"prompt of 512 {figures['pp512']:.0f} tok/s = {figures['tflops']:.1f} TFLOP/s",
                flush=True,
            )
    print(json.dumps(result))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
