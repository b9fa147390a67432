"""Which pages of a map are small, and the two ways to make them huge: real files, real kernel."""

from __future__ import annotations

import pytest

from edgellm.loader import GGUFFile, huge_pages, mapped_pages, open_gguf
from edgellm.loader.mapped_pages import HUGE_PAGE, MappedPages, has_huge_pages
from tests.support.page_cache import RANGES, collapses, in_huge_pages, opened

pytestmark = pytest.mark.skipif(not has_huge_pages(), reason="needs Linux with huge pages of 2 MB")


def test_only_what_was_read_is_touched(on_disk: tuple[GGUFFile, bytes]) -> None:
    path = on_disk[0].paths[0]
    with open_gguf(path) as gguf:
        _, data = gguf.maps[0]
        data[3 * HUGE_PAGE : 5 * HUGE_PAGE].max()
        data[8 * HUGE_PAGE + 5]  # one row of a table
        pages = MappedPages(path, data)
        assert pages.small_ranges() == [3, 4]
        assert 2 * HUGE_PAGE < pages.used_bytes()[0] < 3 * HUGE_PAGE
        pages.close()


def test_many_pieces(on_disk: tuple[GGUFFile, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_pages, "_REGIONS", 2)  # that one question to the kernel gives
    path = on_disk[0].paths[0]
    with open_gguf(path) as gguf:
        _, data = gguf.maps[0]
        data[2 * HUGE_PAGE : 3 * HUGE_PAGE].max()
        data[4 * HUGE_PAGE :: 1 << 18].max()
        with open("/proc/self/pagemap", "rb") as file:  # 8 bytes a page, the top bit says that it is in memory
            file.seek(data.ctypes.data // 4096 * 8)
            present = file.read(RANGES * HUGE_PAGE // 4096 * 8)[7::8]
        pages = MappedPages(path, data)
        assert pages.used_bytes() == (4096 * sum(flags >> 7 for flags in present), 0)
        assert pages.small_ranges() == [2]
        pages.close()


def test_pages_that_cannot_be_dropped_are_copied_together(in_memory: tuple[GGUFFile, bytes]) -> None:
    gguf, whole = in_memory
    if not collapses(gguf):
        pytest.skip("this kernel has no MADV_COLLAPSE for tmpfs")
    path, data = gguf.maps[0]
    pages = opened(gguf)
    pages.settle()
    assert in_huge_pages(path) == RANGES * HUGE_PAGE
    assert data.tobytes() == whole
    pages.close()


def test_older_kernels_can_only_copy(
    in_memory: tuple[GGUFFile, bytes], on_disk: tuple[GGUFFile, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = [collapses(gguf) for gguf, _ in (in_memory, on_disk)]
    monkeypatch.setattr(mapped_pages, "_PAGEMAP_SCAN", 0)  # Linux before 6.7
    for (gguf, whole), can_copy in zip((in_memory, on_disk), copies, strict=True):
        path, data = gguf.maps[0]
        pages = opened(gguf)
        pages.settle()
        pages.settle()
        assert in_huge_pages(path) == (RANGES * HUGE_PAGE if can_copy else 0)
        if data.ctypes.data % HUGE_PAGE == 0:
            assert pages.share() == pytest.approx(in_huge_pages(path) / (-(-len(whole) // 4096) * 4096))
            assert sum(pages._tried.values()) == (RANGES if can_copy else huge_pages._MOST_FAILURES)
        assert data.tobytes() == whole
        pages.close()
