"""The thread team and the kernel cache: several Python threads, sleeping workers, broken and read-only caches."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from edgellm.backends.cpu.backend import CPUBackend
from edgellm.backends.cpu.cores import SCRATCH_BYTES
from edgellm.backends.cpu.elementwise import add_scaled
from edgellm.backends.cpu.jit import Library, jit_disabled
from edgellm.backends.cpu.simd import ISA
from edgellm.backends.cpu.team import ASLEEP, CORE, PER_THREAD, SYSTEM_SCRATCH, THREADS
from edgellm.errors import BackendUnavailable
from tests.cpu.support import Cache, constant

needs_jit = pytest.mark.skipif(jit_disabled(), reason="about compiled kernels")
ROUNDS = 60


def chain(backend, rows=3, width=2048, length=40):
    """A forward of many dependent small ops (each needs what the one before wrote), its batch, and its result."""
    x = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
    table = constant(backend, x)
    batch = replace(Cache(np.random.default_rng(1), 1, rows).batch({0: rows}), ids=np.arange(rows, dtype=np.int32))

    def forward(b):
        y = backend.embed(table, b.ids)
        for _ in range(length):
            y = backend.add(backend.scale(y, 0.5), backend.rms_norm(y, None, 1e-5), 0.25)
        return y

    expected = x
    for _ in range(length):
        rms = np.sqrt(np.mean(expected * expected, -1, keepdims=True, dtype=np.float32) + np.float32(1e-5))
        expected = expected * np.float32(0.5) + np.float32(0.25) * (expected / rms)
    return forward, batch, expected


@needs_jit
def test_replays_are_equal_for_any_number_of_threads():
    results = []
    for threads in (1, 2, 3, 5):
        backend = CPUBackend(threads=threads)
        forward, batch, expected = chain(backend)
        results += [backend.execute(forward, batch) for _ in range(ROUNDS)]
        backend.close()
    np.testing.assert_allclose(results[0], expected, rtol=1e-4, atol=1e-5)
    assert all((results[0] == other).all() for other in results)


@needs_jit
def test_two_python_threads_share_a_backend():
    backend = CPUBackend(threads=2)
    work = [chain(backend, rows, width) for rows, width in ((1, 700), (4, 1500))]
    wrong: list[int] = []

    def run(i):
        forward, batch, expected = work[i]
        for _ in range(ROUNDS):
            if not np.allclose(backend.execute(forward, batch), expected, rtol=1e-4, atol=1e-5):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    backend.close()
    assert wrong == []


@needs_jit
def test_idle_workers_go_to_sleep_and_wake_up():
    backend = CPUBackend(threads=3)
    forward, batch, _ = chain(backend)
    first = backend.execute(forward, batch)
    flags = [(THREADS + i * PER_THREAD + ASLEEP) // 8 for i in (1, 2)]
    deadline = time.monotonic() + 30
    while not all(backend._team._state[flags]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(backend._team._state[flags])
    assert (backend.execute(forward, batch) == first).all()
    backend.close()
    assert not any(t.name.startswith("edgellm-cpu") and t.is_alive() for t in backend._team._workers)
    assert (backend.execute(forward, batch) == first).all()
    backend.close()


@needs_jit
def test_a_system_without_threads_says_so_and_close_is_clean(monkeypatch):
    def workers():
        return [t for t in threading.enumerate() if t.name.startswith("edgellm-cpu")]

    before, start = workers(), threading.Thread.start

    def refuse(thread):
        if thread.name == "edgellm-cpu-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    backend = CPUBackend(threads=3)
    forward, batch, _ = chain(backend)
    first = backend.execute(forward, batch)
    backend.close()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for attempt in (lambda: CPUBackend(threads=3), lambda: backend.execute(forward, batch)):
        with pytest.raises(BackendUnavailable, match=r"thread 3 of 3 cannot be started .*--threads"):
            attempt()
        backend.close()
        assert workers() == before
    monkeypatch.undo()
    assert (backend.execute(forward, batch) == first).all()
    backend.close()


@needs_jit
def test_a_damaged_object_in_the_cache_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    Library().load([add_scaled])
    (path,) = tmp_path.rglob("*.o")
    good = path.read_bytes()
    for damaged in (b"", good[:-100], b"\0" * len(good)):
        path.write_bytes(damaged)
        heard: list[tuple[int, int, str]] = []
        library = Library()
        library.load([add_scaled], lambda *event, heard=heard: heard.append(event))
        assert library.address(add_scaled)
        assert heard == [(0, 1, "add_scaled"), (1, 1, "")]
        assert Library().missing([add_scaled]) == []


@needs_jit
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    """A file where the folder should be: works for root too, who may write to read-only folders."""
    (tmp_path / "kernels").write_text("in the way")
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    library = Library()
    library.load([add_scaled])
    assert library.address(add_scaled)


@needs_jit
def test_two_processes_compile_at_once(tmp_path):
    code = (
        "from edgellm.backends.cpu.jit import Library; from edgellm.backends.cpu.elementwise import add_scaled\n"
        "assert Library().address(add_scaled)"
    )
    env = {"EDGELLM_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    running = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]
    assert [p.wait(timeout=120) for p in running] == [0, 0]
    assert [p.suffix for p in tmp_path.rglob("add_scaled*")] == [".o"]
    assert not list(tmp_path.rglob("*.tmp"))


@needs_jit
def test_an_instruction_set_that_is_not_there_is_refused():
    code = (
        "from edgellm.backends.cpu.jit import Library; from edgellm.backends.cpu.elementwise import add_scaled\n"
        "Library().address(add_scaled)"
    )
    foreign = "neon" if ISA != "neon" else "avx2"
    done = subprocess.run([sys.executable, "-c", code], env={"EDGELLM_ISA": foreign}, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"BackendUnavailable: EDGELLM_ISA={foreign}" in done.stderr


def test_calls_of_the_system_write_where_nothing_else_is():
    """A worker may make them late, when the scratch of the tape that it came for is gone."""
    assert CORE + 24 <= SYSTEM_SCRATCH and SYSTEM_SCRATCH + SCRATCH_BYTES <= PER_THREAD
    assert THREADS % 64 == PER_THREAD % 64 == SYSTEM_SCRATCH % 64 == 0
