"""Model files in small pages of the page cache, and what the kernel says about them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from edgellm.loader import GGUFFile
from edgellm.loader.huge_pages import HugePages
from edgellm.loader.mapped_pages import HUGE_PAGE, MappedPages
from tests.support.gguf_bytes import F32, GGUFBytes

RANGES = 12
"""Whole ranges in the file."""
PLENTY = 1 << 40


def in_huge_pages(path: Path) -> int:
    """Bytes of maps of `path` in this process that are in huge pages, from /proc/self/smaps."""
    total, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            here = words[-1] == str(path)
        elif here and words[0] in ("FilePmdMapped:", "ShmemPmdMapped:"):
            total += int(words[1]) * 1024
    return total


def write_model(path: Path, sync: bool = True) -> bytes:
    """A GGUF of `RANGES` ranges and a bit, written in pieces of 64 KB, so that it is in small pages in the cache."""
    values = np.random.default_rng(7).integers(0, 1 << 32, (RANGES * HUGE_PAGE + 300_000) // 4, np.uint32)
    data = GGUFBytes().text("general.architecture", "llama").tensor("t.weight", F32, [len(values)], values.tobytes())
    whole = data.build()
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(whole), 1 << 16):
            file.write(whole[start : start + (1 << 16)])
        if sync:
            os.fsync(file.fileno())
    return whole


def collapses(gguf: GGUFFile) -> bool:
    """Whether MADV_COLLAPSE works for this file."""
    pages = MappedPages(*gguf.maps[0])
    pages.can_scan = False  # so that nothing else is tried
    try:
        return pages.n_ranges > 0 and pages.make_huge(0)
    finally:
        pages.close()


def opened(gguf: GGUFFile, available: int = PLENTY) -> HugePages:
    """Of a model that was not used."""
    return HugePages(gguf.maps, lambda: 0.0, lambda: True, lambda: available)
