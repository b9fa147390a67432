"""Mapped files come into huge pages: real files, real kernel. What smaps says is the measure, not our own scan."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edgellm import LLM, SamplingParams
from edgellm.loader import GGUFFile, huge_pages, open_gguf
from edgellm.loader.huge_pages import HugePages
from edgellm.loader.mapped_pages import HUGE_PAGE, MappedPages, has_huge_pages
from tests.support.page_cache import PLENTY, RANGES, collapses, in_huge_pages, opened, write_model
from tests.support.real import real_model

pytestmark = pytest.mark.skipif(not has_huge_pages(), reason="needs Linux with huge pages of 2 MB")


@dataclass
class Use:
    """What an engine would say."""

    busy_s: float = 0.0
    runs: bool = False


def in_long_use(gguf: GGUFFile) -> HugePages:
    """Of a model that computes all the time."""
    return HugePages(gguf.maps, time.monotonic, lambda: False, lambda: PLENTY)


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_small_pages_become_huge_and_hold_the_same(on_disk: tuple[GGUFFile, bytes]) -> None:
    gguf, whole = on_disk
    path, data = gguf.maps[0]
    pages = opened(gguf)
    assert pages.share() == 0.0
    pages.settle()
    assert in_huge_pages(path) == RANGES * HUGE_PAGE
    assert pages.share() == 1.0
    assert data.tobytes() == whole
    pages.close()


def test_what_was_just_written(on_disk: tuple[GGUFFile, bytes]) -> None:
    path = on_disk[0].paths[0]
    path.unlink()
    whole = write_model(path, sync=False)
    with open_gguf(path) as gguf:
        assert gguf.maps[0][1].tobytes() == whole
        pages = opened(gguf)
        pages.settle()
        assert in_huge_pages(path) == RANGES * HUGE_PAGE
        assert gguf.maps[0][1].tobytes() == whole
        pages.close()
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert path.read_bytes() == whole  # the disk has it


def test_readers_never_notice(on_disk: tuple[GGUFFile, bytes]) -> None:
    gguf, whole = on_disk
    _, data = gguf.maps[0]
    wanted, found = int(np.frombuffer(whole, np.uint8).sum(dtype=np.int64)), set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            found.add(int(data.sum(dtype=np.int64)))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    pages = opened(gguf)
    for _ in range(2):
        pages.settle()
    stop.set()
    for reader in readers:
        reader.join()
    assert found == {wanted}
    # A reader may have held small pages of a range at the wrong moment, each time.
    assert in_huge_pages(gguf.paths[0]) > RANGES // 2 * HUGE_PAGE
    pages.close()


def test_the_thread_waits_until_nothing_runs(on_disk: tuple[GGUFFile, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_LOOK_S", 0.02)
    gguf, _ = on_disk
    path = gguf.paths[0]
    use, looks = Use(), [0]

    def busy_s() -> float:
        looks[0] += 1
        use.busy_s += 0.001 if use.runs else 0
        return use.busy_s

    def not_yet() -> bool:
        looks[0] = 0
        wait_for(lambda: looks[0] > 10)
        return in_huge_pages(path) == 0

    pages = HugePages(gguf.maps, busy_s, lambda: not use.runs, lambda: PLENTY)
    assert not_yet()  # the model has not computed anything
    use.runs = True
    assert not_yet()
    use.runs = False
    wait_for(lambda: in_huge_pages(path) == RANGES * HUGE_PAGE)
    pages.close()


def test_a_request_has_precedence(on_disk: tuple[GGUFFile, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_LOOK_S", 0.02)
    gguf, _ = on_disk
    path = gguf.paths[0]
    asked = [0]

    def idle() -> bool:
        """A request comes when five ranges are done, and ends two looks later."""
        asked[0] += 1
        return asked[0] not in (7, 8, 9)

    seen: list[int] = []

    def busy_s() -> float:
        seen.append(in_huge_pages(path) // HUGE_PAGE)
        return 0.01

    pages = HugePages(gguf.maps, busy_s, idle, lambda: PLENTY)
    wait_for(lambda: in_huge_pages(path) == RANGES * HUGE_PAGE)
    pages.close()
    assert set(seen) - {RANGES} == {0, 5}


def test_long_use_is_worth_it(on_disk: tuple[GGUFFile, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_LOOK_S", 0.02)
    gguf, whole = on_disk
    seconds = len(whole) * 10 / 1e9
    looks = [0]

    def busy_s() -> float:
        looks[0] += 1
        return seconds * (0.9 + looks[0] / 1e6 if looks[0] <= 10 else 1.1)

    pages = HugePages(gguf.maps, busy_s, lambda: False, lambda: PLENTY)
    wait_for(lambda: in_huge_pages(gguf.paths[0]) > 0)
    assert looks[0] > 10
    wait_for(lambda: in_huge_pages(gguf.paths[0]) == RANGES * HUGE_PAGE)
    pages.close()


def test_closing_while_it_works(on_disk: tuple[GGUFFile, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_LOOK_S", 0.0)
    path, whole = on_disk[0].paths[0], on_disk[1]
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(60):
        write_again = chance.random() < 0.3
        if write_again:
            write_model(path)
        gguf = open_gguf(path)
        gguf.maps[0][1].max()
        pages = in_long_use(gguf)
        helper = threading.Thread(target=pages.settle)
        helper.start()
        time.sleep(chance.random() * 0.02)
        gguf.close()  # the last view of the map but the thread's
        pages.close()
        assert pages.share() is None
        helper.join()
        pages.close()
        del gguf, pages
    on_disk[0].close()
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("after_ms", [0, 5, 15])
def test_a_process_ends_while_it_works(on_disk: tuple[GGUFFile, bytes], after_ms: int) -> None:
    code = (
        "import sys, time\n"
        "from edgellm.loader import huge_pages, open_gguf\n"
        "huge_pages._LOOK_S = 0\n"
        "gguf = open_gguf(sys.argv[1]); gguf.maps[0][1].max()\n"
        "pages = huge_pages.HugePages(gguf.maps, time.monotonic, lambda: False, lambda: 1 << 40)\n"
        "time.sleep(float(sys.argv[2]) / 1000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, on_disk[0].paths[0], str(after_ms)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_it_gives_up_where_another_process_uses_the_file(on_disk: tuple[GGUFFile, bytes]) -> None:
    gguf, whole = on_disk
    if collapses(gguf):
        pytest.skip("MADV_COLLAPSE works for this file, whoever uses it")
    path, data = gguf.maps[0]
    code = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n"
    code += "sum(m[::4096]); print('mapped', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline() == b"mapped\n"
        pages = opened(gguf)
        pages.settle()
        assert in_huge_pages(path) == 0
        assert sum(pages._tried.values()) == huge_pages._MOST_FAILURES < RANGES
        assert data.tobytes() == whole
        other.communicate()
    pages.settle()
    assert in_huge_pages(path) == 0  # for good
    pages.close()


def test_nothing_is_done_where_memory_is_short(on_disk: tuple[GGUFFile, bytes]) -> None:
    gguf, whole = on_disk
    pages = opened(gguf, available=len(whole))
    pages.settle()
    assert pages.share() == 0.0
    assert not pages._tried
    pages.close()


def test_a_file_that_was_cut_off(on_disk: tuple[GGUFFile, bytes]) -> None:
    gguf, whole = on_disk
    path, data = gguf.maps[0]
    pages = MappedPages(path, data)
    os.truncate(path, 4 * HUGE_PAGE)
    assert pages.small_ranges() == [0, 1, 2, 3]
    with pytest.raises(OSError, match=r"model\.gguf"):
        pages.make_huge(RANGES - 1)
    pages.close()
    all_of_it = opened(gguf)
    all_of_it.settle()
    assert data[: 4 * HUGE_PAGE].tobytes() == whole[: 4 * HUGE_PAGE]
    all_of_it.close()


@pytest.mark.real
def test_a_model_answers_the_same(tmp_path: Path) -> None:
    path, original = tmp_path / "model.gguf", real_model("smollm2.gguf")
    with open(original, "rb") as source, open(path, "wb", buffering=0) as copy:
        while piece := source.read(1 << 16):
            copy.write(piece)
        os.fsync(copy.fileno())
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(path, backend="cpu", ctx=512) as llm:
        before = llm.generate("The sky is", params)[0]
        if in_huge_pages(path):
            pytest.skip("this file system has huge pages even of what is written in small pieces")
        share = llm.settle()
        after = llm.generate("The sky is", params)[0]
    assert after.ids == before.ids
    if share:
        assert share > 0.9
    with LLM(path, backend="reference", ctx=512) as llm:
        assert llm.settle() is None
