"""One command for a machine with an NVIDIA GPU: checks every kernel, then measures.

    python bench/cuda_check.py [--quick] [--shapes 1b,8b]

Needs numpy, numba, numba-cuda and this repository, not even an install; with the wheel nvidia-cublas prompts run on
tensor cores. First each kernel against its definition in numpy, then device bandwidth and half-precision matmul rate,
then decode and a prompt of 512 for models of random weights in the shapes of 1B and 8B Llamas. Prints a table, and one
JSON line at the end. Has not run on real hardware yet: figures of the first run belong in bench/LOG.md with the card's
name. NUMBA_ENABLE_CUDASIM=1 with `--simulate` runs the same code in the simulator on tiny shapes: no figures, only a
proof that the script itself works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"1b": (2048, 16, 32, 8, 8192, 128256), "8b": (4096, 32, 32, 8, 14336, 128256)}
SHAPES["tiny"] = (256, 1, 4, 2, 256, 64)
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

from edgellm.backends.base import Batch, KVSpec, QTensor  # noqa: E402
from edgellm.backends.cuda.backend import CUDABackend  # noqa: E402
from edgellm.backends.cuda.device import SIMULATED  # noqa: E402
from edgellm.errors import EdgeLLMError  # noqa: E402
from edgellm.models.config import ModelConfig, RopeConfig  # noqa: E402
from edgellm.models.llama import Llama  # noqa: E402
from edgellm.models.tensors import Tensors  # noqa: E402
from edgellm.quants import GGMLType  # noqa: E402

sys.path.insert(0, str(ROOT / "bench"))
from cuda_kernels import check_kernels, make_batch, random_blocks  # noqa: E402


def random_tensors(shape: tuple[int, ...]) -> dict[str, QTensor]:
    """A Llama of random weights in the types of a Q4_K_M file, its output head tied; equal shapes share their bytes."""
    dim, layers, heads, kv_heads, ffn, vocab = shape
    kv, made = dim // heads * kv_heads, dict[tuple[int, int, GGMLType], np.ndarray]()

    def weight(name: str, n: int, k: int, kind: GGMLType) -> QTensor:
        if (n, k, kind) not in made:
            made[n, k, kind] = random_blocks(kind, n, k, np.random.default_rng(0))
        return QTensor(name, kind, (n, k), made[n, k, kind])

    def norm(name: str) -> QTensor:
        return QTensor(name, GGMLType.F32, (dim,), np.ones(dim, np.float32).view(np.uint8))

    tensors = [weight("token_embd.weight", vocab, dim, GGMLType.Q6_K), norm("output_norm.weight")]
    for i in range(layers):
        # Half of the layers hold these two in six bits.
        better = GGMLType.Q4_K if i % 2 else GGMLType.Q6_K
        rows = {
            "attn_q": (dim, dim, GGMLType.Q4_K),
            "attn_k": (kv, dim, GGMLType.Q4_K),
            "attn_v": (kv, dim, better),
            "attn_output": (dim, dim, GGMLType.Q4_K),
            "ffn_gate": (ffn, dim, GGMLType.Q4_K),
            "ffn_up": (ffn, dim, GGMLType.Q4_K),
            "ffn_down": (dim, ffn, better),
        }
        tensors += [weight(f"blk.{i}.{name}.weight", *what) for name, what in rows.items()]
        tensors += [norm(f"blk.{i}.{name}.weight") for name in ("attn_norm", "ffn_norm")]
    return {tensor.name: tensor for tensor in tensors}


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

    n = 1 << (20 if SIMULATED else 27)
    a, b = cuda.device_array(n, np.float32), cuda.device_array(n, np.float32)
    b.copy_to_device(a)
    return 2 * a.nbytes / seconds(lambda: b.copy_to_device(a)) / 1e9


def half_rate(gpu: CUDABackend) -> float | None:
    """TFLOP/s of the half-precision matmul that prompts use; None where there is none."""
    from numba import cuda

    if gpu.half is None:
        return None
    n = 4096
    a, b = cuda.device_array(n * n, np.float16), cuda.device_array(n * n, np.float16)
    y = cuda.device_array(n * n, np.float32)
    for array in (a, b):
        array.copy_to_device(np.ones(n * n, np.float16))
    gpu.half.multiply(a, b, y, 0, n, n, n, n)
    return 2 * n**3 / seconds(lambda: gpu.half.multiply(a, b, y, 0, n, n, n, n)) / 1e12


def measure_model(gpu: CUDABackend, name: str) -> dict[str, float]:
    """tok/s of decode from depth `prompt` on and of a prompt (512), and the weight bytes a token reads."""
    dim, layers, heads, kv_heads, ffn, vocab = shape = SHAPES[name]
    head, prompt, steps = dim // heads, 512 if not SIMULATED else 4, 16 if not SIMULATED else 1
    config = ModelConfig(
        *("llama", layers, dim, heads, kv_heads, head, head, ffn, vocab, 8192, 1e-5),
        rope=RopeConfig(n_dims=head, base=500000.0),
    )
    tensors = Tensors(random_tensors(shape), gpu)
    model = Llama(config, tensors)
    kv = [gpu.new_kv(KVSpec(kv_heads, head, head, "f16", 32, 0, layer), 40) for layer in range(layers)]
    table = np.arange(1, 40, dtype=np.int32)[None]

    def forward(batch: Batch) -> object:
        return model.forward(batch, kv)

    def run(start: int, n: int) -> None:
        logits = gpu.execute(forward, make_batch(start, n, table))
        assert np.isfinite(logits).all(), "logits are not finite"

    started = time.perf_counter()
    run(0, prompt)
    run(prompt, 1)
    compile_s = time.perf_counter() - started
    repeats = 1 if SIMULATED else 3
    prompt_s = seconds(lambda: run(0, prompt), repeats)
    decode_s = seconds(lambda: [run(prompt + i, 1) for i in range(steps)], repeats) / steps
    # The tied output head is read whole; of the embedding a token reads a row, but it is the same table.
    weights = sum(w.data.nbytes for w in tensors.loaded.values())
    values = sum(int(np.prod(w.shape)) for name, w in tensors.loaded.items() if len(w.shape) == 2)
    matmul_values = values - vocab * dim  # of a prompt only the last row meets the output head
    return {
        "pp512": prompt / prompt_s,
        "tg": 1 / decode_s,
        "weights_bytes": weights,
        "gb_s": weights / decode_s / 1e9,
        "tflops": 2 * prompt * matmul_values / prompt_s / 1e12,
        "compile_s": compile_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="kernel checks only")
    parser.add_argument("--shapes", default="1b,8b")
    parser.add_argument("--simulate", action="store_true", help="tiny shapes, for numba-cuda's simulator")
    options = parser.parse_args()
    if options.simulate != SIMULATED:
        parser.error("--simulate goes with NUMBA_ENABLE_CUDASIM=1, and nothing else does")
    if SIMULATED:
        sys.setswitchinterval(1e-5)  # the simulator's threads wait for each other all the time
    try:
        gpu = CUDABackend()
    except EdgeLLMError as error:
        sys.exit(f"cuda_check: {error}")
    checks = check_kernels(gpu, small=SIMULATED)
    for name, error, limit in checks:
        print(f"{'ok   ' if error < limit else 'WRONG'} {name:<36} {error:.1e}", flush=True)
    wrong = [name for name, error, limit in checks if not error < limit]
    print(f"kernels: {'all right' if not wrong else 'WRONG: ' + '; '.join(wrong)}", flush=True)
    result: dict[str, object] = {**gpu.describe(), "simulated": SIMULATED, "checks": len(checks), "wrong": wrong}
    if not options.quick:
        measure(gpu, ["tiny"] if SIMULATED else options.shapes.split(","), result)
    print(json.dumps(result))
    sys.exit(1 if wrong else 0)


def measure(gpu: CUDABackend, shapes: list[str], result: dict[str, object]) -> None:
    """Print the table and add the figures to `result`."""
    bandwidth = device_bandwidth()
    rate = half_rate(gpu)
    print(f"{result['device']}: {bandwidth:.0f} GB/s copied; prompts: {result['prompt_matmul']}", flush=True)
    if rate:
        print(f"half-precision matmul: {rate:.0f} TFLOP/s", flush=True)
    result |= {"bandwidth_gb_s": bandwidth, "half_tflops": rate}
    print(f"{'shape':<6} {'decode tok/s':>12} {'of bandwidth':>12} {'prompt tok/s':>12} {'TFLOP/s':>8} {'of rate':>8}")
    for name in shapes:
        figures = measure_model(gpu, name)
        result[name] = figures
        share = f"{figures['tflops'] / rate:.0%}" if rate else "-"
        print(
            f"{name:<6} {figures['tg']:>12.1f} {figures['gb_s'] / bandwidth:>12.0%} {figures['pp512']:>12.0f} "
            f"{figures['tflops']:>8.1f} {share:>8}",
            flush=True,
        )
    if SIMULATED:
        print("in the simulator: these figures mean nothing")


if __name__ == "__main__":
    main()
