"""Pages of a mapped file under Linux, in ranges of one huge page (2 MB): which are in one, and how one gets there.

Plain system calls through ctypes, so that other threads run on meanwhile. Sources: `Documentation/admin-guide/mm/
pagemap.rst` (PAGEMAP_SCAN, Linux 6.7), `proc.rst` (smaps), madvise(2), posix_fadvise(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["HUGE_PAGE", "MappedPages", "has_huge_pages"]

HUGE_PAGE = 2 << 20
"""Bytes. ARM kernels with pages of 16 or 64 KiB have huge pages of 32 and 512 MiB: too much to read at a time."""
_PAGE = 4096
_MADV_DONTNEED, _MADV_POPULATE_READ, _MADV_COLLAPSE = 4, 22, 25
_SYNC_WAIT_WRITE_WAIT = 7
_PRESENT, _HUGE = 1 << 3, 1 << 6
_REGIONS = 256


class _Scan(ctypes.Structure):
    """struct pm_scan_arg."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "vec", "vec_len", "max_pages"),
            *("category_inverted", "category_mask", "category_anyof_mask", "return_mask"),
        )
    ]


class _Region(ctypes.Structure):
    """struct page_region: adjacent pages that were asked for."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("start", "end", "categories")]


_PAGEMAP_SCAN = 3 << 30 | ctypes.sizeof(_Scan) << 16 | ord("f") << 8 | 16


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    libc.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
    return libc


def has_huge_pages() -> bool:
    """Whether this kernel has huge pages of the size that is known here."""
    try:
        size = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text()
    except OSError:
        return False
    return sys.platform == "linux" and int(size) == HUGE_PAGE


class MappedPages:
    """`data`: the whole file's map, uint8 (bytes,); it stays mapped at least until `close`."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]):
        self.path, self.data = path, data
        self._address = data.ctypes.data
        # A huge page begins where both the address and the place in the file are multiples of its size.
        self.n_ranges = 0 if self._address % HUGE_PAGE else len(data) // HUGE_PAGE
        self._file = self._pagemap = -1
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            list(self._scan(0, min(1, self.n_ranges), huge=True))
            self.can_scan = True
        except OSError:  # an older kernel, or the file has another name by now
            self.can_scan = False

    def close(self) -> None:
        """Lets go of the map and the files. Idempotent."""
        for handle in (self._file, self._pagemap):
            if handle >= 0:
                os.close(handle)
        self._file = self._pagemap = -1
        self.data, self.n_ranges = np.empty(0, np.uint8), 0

    def used_bytes(self) -> tuple[int, int]:
        """Bytes that this process has touched, and those of them that lie in huge pages."""
        if not self.can_scan:
            return self._smaps()
        small, huge = (sum(stop - start for start, stop in self._scan(0, self.n_ranges, x)) for x in (False, True))
        return small + huge, huge

    def small_ranges(self) -> list[int]:
        """Ranges that were touched for the greater part and are not in a huge page. Of a matrix of embeddings, of
        which a row is read here and there, none is."""
        if not self.can_scan:
            used, huge = self._smaps()
            return list(range(self.n_ranges)) if max(len(self.data), 10 * huge) < 2 * used else []
        touched: Counter[int] = Counter()
        for start, stop in self._scan(0, self.n_ranges, huge=False):
            for i in range(start // HUGE_PAGE, -(-stop // HUGE_PAGE)):
                touched[i] += min(stop, (i + 1) * HUGE_PAGE) - max(start, i * HUGE_PAGE)
        return [i for i, n_bytes in touched.items() if 2 * n_bytes > HUGE_PAGE]

    def write_back(self, i: int) -> None:
        """Returns when the disk has what was written into range `i`, such as by a download that has just ended: before,
        its pages can neither be dropped nor copied together."""
        if self._file >= 0:
            _libc().sync_file_range(self._file, i * HUGE_PAGE, HUGE_PAGE, _SYNC_WAIT_WRITE_WAIT)

    def make_huge(self, i: int) -> bool:
        """Brings range `i` into a huge page and says whether it is in one now. Threads that read there meanwhile wait.

        Where the kernel cannot copy small pages of files together (or cannot for this file system), they are dropped
        and read again: file systems with large folios then take a huge one. OSError: the file cannot be read there.
        """
        done = self._advise(i, _MADV_COLLAPSE)
        if not done or done == errno.ENOMEM or not self.can_scan:
            return not done
        self._advise(i, _MADV_DONTNEED)  # the page cache keeps what is mapped
        os.posix_fadvise(self._file, i * HUGE_PAGE, HUGE_PAGE, os.POSIX_FADV_DONTNEED)
        failed = self._advise(i, _MADV_POPULATE_READ)
        if failed:
            raise OSError(failed, os.strerror(failed), str(self.path))
        # A virtual machine may get each page of new memory when it first reads it, 3 us a page: here, not in a kernel.
        self.data[i * HUGE_PAGE : (i + 1) * HUGE_PAGE : _PAGE].max()
        return next(self._scan(i, i + 1, huge=True), None) is not None

    def _advise(self, i: int, advice: int) -> int:
        """0, or an errno."""
        failed = _libc().madvise(self._address + i * HUGE_PAGE, HUGE_PAGE, advice)
        return ctypes.get_errno() if failed else 0

    def _scan(self, first: int, last: int, huge: bool) -> Iterator[tuple[int, int]]:
        """(start, stop) in bytes of the file, in ranges [first, last): touched pages that are in huge pages or not."""
        regions = (_Region * _REGIONS)()
        start, end = (self._address + i * HUGE_PAGE for i in (first, last))
        asked = _Scan(ctypes.sizeof(_Scan), 0, start, end, vec=ctypes.addressof(regions), vec_len=_REGIONS)
        asked.category_inverted, asked.category_mask = 0 if huge else _HUGE, _PRESENT | _HUGE
        while asked.start < end:
            found = _libc().ioctl(self._pagemap, _PAGEMAP_SCAN, ctypes.byref(asked))
            if found < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            for region in regions[:found]:
                yield region.start - self._address, region.end - self._address
            asked.start = asked.walk_end

    def _smaps(self) -> tuple[int, int]:
        """`used_bytes` by /proc/self/smaps, which knows sums only."""
        sums = {b"Rss:": 0, b"FilePmdMapped:": 0, b"ShmemPmdMapped:": 0}
        here = False
        with open("/proc/self/smaps", "rb") as file:
            for line in file:
                name, *rest = line.split()
                if not name.endswith(b":"):
                    here = name.startswith(b"%08x-" % self._address)
                elif here and name in sums:
                    sums[name] += int(rest[0]) << 10
        return sums[b"Rss:"], sums[b"FilePmdMapped:"] + sums[b"ShmemPmdMapped:"]
