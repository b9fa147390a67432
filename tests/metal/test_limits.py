"""What an Apple GPU may hold: figures of real chips, as `mx.device_info()` gives them, drive limits, plans and
refusals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

mx = pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")

from edgellm import LLM, backends  # noqa: E402
from edgellm.backends.metal.backend import MetalBackend  # noqa: E402
from edgellm.backends.metal.limits import limits_of  # noqa: E402
from edgellm.cli.plan import plan  # noqa: E402
from edgellm.errors import MemoryBudgetError  # noqa: E402
from edgellm.hub.machines import MACHINES  # noqa: E402
from edgellm.quants import GGMLType, QTensor  # noqa: E402
from tests.metal.harness import maker  # noqa: E402
from tests.support.goldens import DATA, Golden  # noqa: E402

GB = 1 << 30
MIB = 1 << 20
# (memory, recommended working set in MiB, largest buffer in MiB) that macOS gives, and our table's name of the machine.
CHIPS = {
    "Apple M1": (8 * GB, 5461, 4096, "m1-8gb"),
    "Apple M1 Pro": (32 * GB, 21845, 16384, "m1-pro-32gb"),
    "Apple M2": (24 * GB, 16384, 12288, "m2-24gb"),
    "Apple M2 Ultra": (192 * GB, 147456, 110592, "m2-ultra-192gb"),
    "Apple M3 Max": (36 * GB, 27648, 20736, "m3-max-36gb"),
    "Apple M4 Max": (64 * GB, 49152, 36864, "m4-max-64gb"),
    "Apple M3 Ultra": (512 * GB, 393216, 294912, "m3-ultra-512gb"),
}


def device_info(chip: str) -> dict[str, Any]:
    memory, working_set, buffer, _ = CHIPS[chip]
    return {
        "device_name": chip,
        "memory_size": memory,
        "max_recommended_working_set_size": working_set * MIB,
        "max_buffer_length": buffer * MIB,
        "resource_limit": 499000,
    }


@pytest.fixture(params=sorted(CHIPS))
def chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Mac of that kind, with nothing else in its memory, as far as memory is concerned."""
    name = str(request.param)
    memory = CHIPS[name][0]
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: device_info(name))
    monkeypatch.setattr(mx, "set_wired_limit", lambda n: None)
    monkeypatch.setattr(mx, "set_cache_limit", lambda n: None)
    monkeypatch.setattr("edgellm.backends.metal.backend.check_attention", lambda kernels: [])
    monkeypatch.setattr(backends, "default_name", lambda: "metal")
    monkeypatch.setattr("edgellm.cli.plan._own_bandwidth", lambda: 1e11)
    monkeypatch.setattr("edgellm.memory.machine_memory", lambda: (memory, memory))
    return name


def test_limits_are_set_from_the_device(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, int] = {}
    monkeypatch.setattr(mx, "set_wired_limit", lambda n: given.update(wired=n))
    monkeypatch.setattr(mx, "set_cache_limit", lambda n: given.update(cache=n))
    backend = MetalBackend(maker())
    memory, working_set, _, _ = CHIPS[chip]
    assert given["wired"] == backend.memory_limit == working_set * MIB
    assert 256 * MIB <= given["cache"] <= min(2 * GB, max(256 * MIB, memory // 32))


def test_the_plan_for_this_mac_is_the_table_s(chip: str) -> None:
    """`plan` without --machine on that Mac, and with --machine elsewhere: the same budget, to a permille."""
    model = str(Golden("llama", DATA / "goldens").path())
    run = CliRunner().invoke(plan, [model, "--json"])
    assert run.exit_code == 0, run.output
    budget = json.loads(run.stdout)["budget_bytes"]
    assert budget == CHIPS[chip][1] * MIB
    assert abs(MACHINES[CHIPS[chip][3]].budget / budget - 1) < 1e-3


def test_what_does_not_fit_is_refused_before_it_is_loaded(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file as large as the GPU's share of memory: no room for cache and scratch, so it is refused with its bytes."""
    limit = CHIPS[chip][1] * MIB
    monkeypatch.setattr("edgellm.loader.file.GGUFFile.nbytes", limit)
    monkeypatch.setattr("edgellm.opening.load_model", lambda *arguments: pytest.fail("it was loaded"))
    model = Golden("llama", DATA / "goldens").path()
    for memory in (None, 2 * limit):  # what is asked for beyond the device does not count
        with pytest.raises(MemoryBudgetError) as refused:
            LLM(model, backend="metal", memory=memory)
        assert f"weights {limit}" in str(refused.value)
        assert f"memory budget is {limit}" in str(refused.value)


def test_a_tensor_larger_than_one_buffer_is_refused(chip: str) -> None:
    n_bytes = CHIPS[chip][2] * MIB + 144
    data = np.broadcast_to(np.zeros(144, np.uint8), (n_bytes // 144 + 1, 144))
    with pytest.raises(MemoryBudgetError, match=rf"blk\.0\.ffn_up\.weight is {data.nbytes} bytes"):
        MetalBackend(maker()).load(QTensor("blk.0.ffn_up.weight", GGMLType.Q4_K, (len(data), 256), data))


def test_a_device_without_figures_keeps_the_defaults() -> None:
    assert limits_of({"memory_size": 16 * GB}).wired == 12 * GB
    assert limits_of({"device_name": "llvmpipe"}) == limits_of({})
    assert limits_of({}).wired == 0
    assert backends.memory_limit("cpu") is None
