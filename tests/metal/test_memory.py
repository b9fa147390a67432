"""What the Metal backend takes of the unified memory: cache rows in place, one copy of each weight, layers left in the
file where asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")

from edgellm import LLM, SamplingParams  # noqa: E402
from edgellm.backends.base import KVSpec  # noqa: E402
from edgellm.backends.metal.backend import MetalBackend  # noqa: E402
from edgellm.backends.metal.kv import MetalKV  # noqa: E402
from edgellm.errors import MemoryBudgetError  # noqa: E402
from edgellm.loader import open_gguf  # noqa: E402
from edgellm.memory import runtime_bytes  # noqa: E402
from edgellm.models.registry import load_model  # noqa: E402
from tests.support.goldens import DATA, Golden  # noqa: E402
from tests.support.models import Runner  # noqa: E402
from tests.support.tiny import tiny_gguf  # noqa: E402

MIB = 1 << 20
LLAMA = Golden("llama", DATA / "goldens")


def growth(run: Runner, steps: int) -> list[int]:
    """Bytes of each decode step's peak above what was there before it."""
    found = []
    for _ in range(steps):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        run.run([1])
        found.append(mx.get_peak_memory() - before)
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("memory") / "m.gguf", head_dim=32)


def decoding(path: Path, kv_type: str) -> Runner:
    """After a few steps, with a cache of some MiB per layer."""
    backend = MetalBackend()
    run = Runner(load_model(open_gguf(path), backend), backend, kv_type, n_ctx=65536)
    for kv in run.kv:
        kv.reserve(kv.n_blocks)
    run.run(range(20, 60))
    growth(run, 5)
    return run


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
def test_cache_writes_copy_nothing(path: Path, kv_type: str) -> None:
    """200 decode steps: no step takes as much as one layer's K, so rows are written in place."""
    run = decoding(path, kv_type)
    pages = run.kv[0].k.values.nbytes
    assert pages > 2 * MIB
    active = mx.get_active_memory()
    assert max(growth(run, 200)) < pages / 2
    assert mx.get_active_memory() - active < MIB


def test_a_page_array_that_is_held_would_be_seen(path: Path) -> None:
    """The same measure sees the copy that MLX makes while anyone else holds the pages."""
    run = decoding(path, "f32")
    held = [kv.k.values.reshape(-1) for kv in run.kv]
    mx.eval(held)
    assert growth(run, 1)[0] > run.kv[0].k.values.nbytes


def test_a_cache_takes_memory_as_it_is_used(path: Path) -> None:
    """A pool of 10,000 blocks takes what its first 64 need, and doubles."""
    backend = MetalBackend()
    model = load_model(open_gguf(path), backend)
    run = Runner(model, backend, "f32", n_ctx=320_000)
    kv = run.kv[0]
    first = kv.nbytes
    assert first == 64 * kv.spec.block_size * 2 * 2 * 32 * 4
    run.tables = [np.arange(1, 10_001, dtype=np.int32)[None]] * len(run.tables)
    small = run.logits([5, 6, 7])
    assert kv.nbytes == first
    rows = kv.read_block(1)
    kv.copy_block(1, 64)
    assert kv.nbytes == 2 * first
    assert kv.read_block(64) == kv.read_block(1) == rows
    np.testing.assert_array_equal(run.logits([5, 6, 7]), small)
    with pytest.raises(IndexError):
        kv.read_block(10_001)


def test_a_block_survives_saving_and_loading() -> None:
    kv = MetalKV(KVSpec(2, 32, 64, "q8_0", 32, 0), 4)
    rng = np.random.default_rng(0)
    kv.k.write(mx.arange(128), mx.array(rng.standard_normal((128, 2, 32)).astype(np.float32)))
    kv.v.write(mx.arange(128), mx.array(rng.standard_normal((128, 2, 64)).astype(np.float32)))
    kv.write_block(3, kv.read_block(1))
    kv.copy_block(1, 2)
    assert kv.read_block(3) == kv.read_block(2) == kv.read_block(1) != kv.read_block(0)


LOAD = """
import sys
from edgellm.backends.metal.backend import MetalBackend
from edgellm.loader import open_gguf
from edgellm.memory import peak_bytes, runtime_bytes
from edgellm.models.registry import load_model
backend, gguf = MetalBackend(), open_gguf(sys.argv[1])
before = runtime_bytes()
model = load_model(gguf, backend)
largest = max(tensor.nbytes for tensor in gguf.tensors.values())
print(gguf.nbytes, largest, peak_bytes() - before)
"""


def peak_of_loading(path: Path) -> tuple[int, int, int]:
    """(file size, largest tensor, the most memory of a fresh process above what it held before it loaded)."""
    run = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=True)
    size, largest, peak = map(int, run.stdout.split())
    return size, largest, peak


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 MB, most of it in large matrices."""
    return tiny_gguf(tmp_path_factory.mktemp("large") / "m.gguf", "llama", dim=1024, ffn_dim=8192, n_layers=2)


def test_loading_peaks_at_the_file_and_one_tensor(large: Path) -> None:
    """Mapped pages count as memory: a second copy would be another 100 MB."""
    size, largest, peak = peak_of_loading(large)
    assert size > 90 * MIB
    assert peak < size + largest + 30 * MIB


@pytest.mark.thorough
def test_partial_runs_what_is_refused_otherwise(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM(large, backend="metal", ctx=64) as llm:
        expected = llm.generate([[5, 6, 7]], params)[0].ids
        plan = llm.engine.plan
    memory = runtime_bytes() + plan.scratch_bytes + plan.kv_bytes + plan.weights_bytes // 2
    with pytest.raises(MemoryBudgetError, match=f"weights {plan.weights_bytes}"):
        LLM(large, backend="metal", ctx=64, memory=memory)
    with LLM(large, backend="metal", ctx=64, memory=memory, partial=True) as llm:
        assert llm.generate([[5, 6, 7]], params)[0].ids == expected
        held = llm.engine.plan.weights_bytes
    assert held < plan.weights_bytes * 0.7
    assert f"{held} of {plan.weights_bytes} bytes of weights fit" in caplog.text


@pytest.mark.slow  # EDGELLM_BENCH_MODEL=<a file of many GB> python -m pytest -m slow tests/metal/test_memory.py
def test_loading_a_large_file() -> None:
    import os

    path = os.environ.get("EDGELLM_BENCH_MODEL")
    if path is None:
        pytest.skip("EDGELLM_BENCH_MODEL names no file")
    size, largest, peak = peak_of_loading(Path(path))
    assert peak < size + largest + 200 * MIB, (size, largest, peak)


@pytest.mark.parametrize("share", [0, 2])
def test_layers_that_do_not_fit_are_read_from_the_file(share: int) -> None:
    """The same logits from mapped weights, and only what fits is held."""
    gguf = open_gguf(LLAMA.path())
    whole, part = MetalBackend(), MetalBackend()
    room = gguf.nbytes // share if share else 0
    part.keep_weights(room)
    expected = Runner(load_model(gguf, whole), whole, "f32").logits(LLAMA.ids(1))
    model = load_model(gguf, part)
    held = sum(weight.nbytes for weight in weights_of(model) if len(weight.shape) > 1)
    assert held <= room
    np.testing.assert_allclose(Runner(model, part, "f32").logits(LLAMA.ids(1)), expected, atol=1e-5)


def weights_of(model: object) -> list:
    """Every weight that a model's layers hold."""
    from edgellm.backends.metal.weights import MetalWeight

    found, seen, todo = [], set(), [model]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, MetalWeight):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            todo += item
        elif type(item).__module__.startswith("edgellm.models"):
            todo += vars(item).values()
    return found
