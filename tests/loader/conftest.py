"""Models that lie in small pages of the page cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm.loader import GGUFFile, open_gguf
from edgellm.loader.mapped_pages import HUGE_PAGE
from tests.support.page_cache import RANGES, in_huge_pages, write_model


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[tuple[GGUFFile, bytes]]:
    """A model whose pages are small and could be huge; all of it has been read."""
    path = tmp_path / "model.gguf"
    whole = write_model(path)
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open_gguf(path) as gguf:
        (_, data), *_ = gguf.maps
        assert data.tobytes() == whole
        if in_huge_pages(path) < RANGES // 2 * HUGE_PAGE:
            pytest.skip("this file system does not read files into huge pages")
        del data
    write_model(path)
    with open_gguf(path) as gguf:
        assert gguf.maps[0][1].tobytes() == whole
        if in_huge_pages(path):
            pytest.skip("this file system has huge pages even of what is written in small pieces")
        yield gguf, whole


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[tuple[GGUFFile, bytes]]:
    """The same on tmpfs, whose pages cannot be dropped; the kernel can copy them together (MADV_COLLAPSE)."""
    folder = Path(f"/dev/shm/edgellm-test-{os.getpid()}")
    path = folder / "model.gguf"
    try:
        folder.mkdir()
        whole = write_model(path)
        with open_gguf(path) as gguf:
            assert gguf.maps[0][1].tobytes() == whole
            if in_huge_pages(path):
                pytest.skip("tmpfs has huge pages of its own here")
            yield gguf, whole
    except OSError as error:
        pytest.skip(f"no tmpfs to write to: {error}")
    finally:
        path.unlink(missing_ok=True)
        folder.rmdir()
