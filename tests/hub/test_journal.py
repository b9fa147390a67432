"""The journal: data is synced before a part is noted, torn lines count for nothing, kill -9 loses little."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from edgellm.hub.download import download
from edgellm.hub.fetch import Fetcher
from edgellm.hub.journal import Geometry, Partial, part_size_for
from edgellm.hub.manifest import MODEL
from edgellm.hub.pull import PullOptions, partials, pull, remove_partials
from edgellm.hub.store import Store
from edgellm.hub.web import Web
from tests.support.hubs import serve_registry, sha256
from tests.support.origin import Origin


class Recording(Partial):
    """Writes down the order of writes, syncs and notes."""

    def __init__(self, *args: object) -> None:
        self.events: list[tuple[str, int]] = []
        self.lock = threading.Lock()
        super().__init__(*args)  # type: ignore[arg-type]

    def write(self, offset: int, block: bytes | bytearray | memoryview) -> None:
        super().write(offset, block)
        with self.lock:
            self.events.append(("write", offset // self.geometry.part_size))

    def sync(self) -> None:
        with self.lock:
            self.events.append(("sync", 0))
        super().sync()

    def note(self, parts: object) -> None:
        parts = list(parts)  # type: ignore[call-overload]
        with self.lock:
            self.events += [("note", part) for part, _ in parts]
        super().note(parts)


def noted_before_sync(events: list[tuple[str, int]]) -> list[int]:
    """Parts that were noted without a sync that began after their write."""
    unsynced, wrong = set(), []
    for what, part in events:
        if what == "write":
            unsynced.add(part)
        elif what == "sync":
            unsynced.clear()
        elif part in unsynced:
            wrong.append(part)
    return wrong


def test_data_is_synced_before_the_journal_says_so(tmp_path: Path, origin: Origin) -> None:
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(3).bytes(5 << 20))
    origin.file("/x", path)
    partial = Recording(tmp_path / "p", "key", path.stat().st_size, "x")
    with Web(True) as web:
        fetcher = Fetcher(web, lambda: web.locate(f"{origin.url}/x"), path.stat().st_size, threading.Event())
        assert download(fetcher, partial, sha256(path), lambda n: None) == sha256(path)
    partial.close()
    assert noted_before_sync(partial.events) == []
    assert sorted(p for what, p in partial.events if what == "note") == list(range(partial.geometry.n_parts))


def test_the_check_sees_the_other_order() -> None:
    assert noted_before_sync([("write", 1), ("sync", 0), ("note", 1)]) == []
    assert noted_before_sync([("write", 1), ("note", 1), ("sync", 0)]) == [1]
    assert noted_before_sync([("sync", 0), ("write", 1), ("note", 1)]) == [1]


def test_torn_and_foreign_lines_count_for_nothing(tmp_path: Path) -> None:
    size = 3 << 20
    partial = Partial(tmp_path, "k", size, "label")
    piece = bytes(256 << 10)
    digest = f"{zlib.crc32(piece):08x}"
    partial.write(0, piece)
    partial.note([(0, digest), (5, digest)])
    partial.close()
    good = partial.journal.read_bytes()
    for tail in (b"7 " + digest.encode(), b"7 abc\n", b"\0" * 100 + b"\n", b"99 " + digest.encode() + b"\n", b"\xff\n"):
        partial.journal.write_bytes(good + tail)
        again = Partial(tmp_path, "k", size, "label")
        assert again.done == {0: digest, 5: digest}
        again.close()
    for n in range(0, len(good), 9):
        partial.journal.write_bytes(good[:n])
        again = Partial(tmp_path, "k", size, "label")
        assert set(again.done) <= {0, 5}
        again.close()
    partial.journal.write_bytes(good)
    other = Partial(tmp_path, "k", size + 1, "label")  # the file became another one
    assert other.done == {} and other.data.stat().st_size == size + 1
    other.close()


@pytest.mark.parametrize("size", [1, 4096, 1 << 20, 300 << 20, 2 << 30, 40 << 30, 1 << 42])
def test_geometry(size: int) -> None:
    geometry = Geometry(size, part_size_for(size))
    assert sum(geometry.length(part) for part in (0, geometry.n_parts - 1)) <= 2 * geometry.part_size
    assert geometry.span(geometry.n_parts - 1)[1] == size and geometry.span(0)[0] == 0
    if size >= 300 << 20:
        assert 4 * geometry.part_size < size / 100
    if size >= 2 << 30:  # whole huge pages
        assert geometry.part_size % (2 << 20) == 0


CHILD = """
import os, sys
from pathlib import Path
from edgellm.hub.pull import PullOptions, pull
from edgellm.hub.store import Store
pull(sys.argv[1], Store(Path(sys.argv[2])), PullOptions(insecure=True, retry_s=0.05))
"""


def killed_pull(origin: Origin, root: Path, kills: int, draw: random.Random, lasts: float) -> None:
    """Pulls in child processes; `kills` of them are killed at a random moment of the transfer."""
    name = f"http://127.0.0.1:{origin.port}/library/m"
    for _ in range(kills):
        before = len(origin.requests)
        child = subprocess.Popen([sys.executable, "-c", CHILD, name, str(root)])
        while child.poll() is None and len(origin.requests) < before + 3:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, lasts))
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert subprocess.run([sys.executable, "-c", CHILD, name, str(root)], timeout=300).returncode == 0


def check_kills(tmp_path: Path, size: int, runs: int, kills: int, rate: float, limit: float) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed", seed)
    draw = random.Random(seed)
    path = tmp_path / "model"
    path.write_bytes(np.random.default_rng(5).bytes(size))
    for run in range(runs):
        with Origin() as origin:
            (how,) = serve_registry(origin, "library/m", [(MODEL, path)])
            how.rate = rate
            root = tmp_path / f"store{run}"
            killed_pull(origin, root, kills, draw, size / rate / 4 / (kills + 1) * 1.5)
            (blob,) = (p for p in (root / "blobs").iterdir() if p.stat().st_size == size)
            assert sha256(blob) == sha256(path)
            again = origin.asked(f"/v2/library/m/blobs/sha256:{sha256(path)}") - size
            print(f"run {run}: {again / size:.2%} asked again")
            assert again <= limit * size, (seed, run, again / size)
            blob.unlink()


def test_kill_9_and_resume(tmp_path: Path) -> None:
    """A small edition: the parts of a 48 MB file are as large as those of a 160 MB one, so the limit is wider."""
    check_kills(tmp_path, 48 << 20, runs=1, kills=2, rate=16e6, limit=0.25)


@pytest.mark.slow
def test_kill_9_of_300_mb(tmp_path: Path) -> None:
    """pytest -m slow tests/hub -s: 20 runs with a kill each, and one with 20 (a few minutes)."""
    check_kills(tmp_path, 300_000_000, runs=20, kills=1, rate=50e6, limit=0.05)
    check_kills(tmp_path, 300_000_000, runs=1, kills=20, rate=25e6, limit=0.25)


def test_resume_in_one_process_reads_nothing_twice(origin: Origin, store: Store, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(np.random.default_rng(5).bytes(2 << 20))
    serve_registry(origin, "library/m", [(MODEL, path)])
    pull(f"http://127.0.0.1:{origin.port}/library/m", store, PullOptions(insecure=True))
    assert origin.asked(f"/v2/library/m/blobs/sha256:{sha256(path)}") == 2 << 20


LEAVER = "import sys, pathlib; from edgellm.hub.disk import scratch\n"
LEAVER += "with scratch(pathlib.Path(sys.argv[1]), 'upload-') as (out, _):\n"
LEAVER += "    out.write(b'x' * 5000), out.flush(), print('written', flush=True), sys.stdin.read()"


def test_what_a_killed_upload_left_is_listed_and_removed(store: Store) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", LEAVER, str(store.partial)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"written\n"
        assert (partials(store), remove_partials(store)) == ([], []), "a running process's file"
        child.kill()
    (left,) = store.partial.iterdir()
    (entry,) = partials(store)
    assert (entry["key"], entry["size"], entry["left"]) == (left.name, 5000, True)
    assert remove_partials(store) == [left.name] and not list(store.partial.iterdir())
