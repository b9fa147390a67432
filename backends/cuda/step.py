"""What crosses between host and device in a step, through page-locked memory: the batch's integers in one copy, and the
rows of the result in one copy, which is also the step's only wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cuda

from edgellm.backends.base import Batch

__all__ = ["Crossing"]

ALIGN = 4
"""int32 per 16 bytes: each field starts at an address that a wide load may use."""


class Crossing:
    """Page-locked buffers that grow to the largest step so far, and the device's copy of the current batch."""

    def __init__(self) -> None:
        self._up: npt.NDArray[np.int32] = cuda.pinned_array(1, np.int32)
        self._down: npt.NDArray[np.float32] = cuda.pinned_array(1, np.float32)
        self._device = cuda.device_array(1, np.int32)
        self._batch: Batch | None = None
        self._fields: dict[int, tuple[npt.NDArray[np.int32], Any]] = {}
        self._seqs: Any = None

    def send(self, batch: Batch) -> None:
        """Copy a batch's integers to the device."""
        seqs = np.repeat(np.arange(batch.n_seqs, dtype=np.int32), np.diff(batch.seq_starts))
        fields = [batch.ids, batch.positions, batch.context_lens, batch.output_rows, batch.rope_variants, seqs]
        fields += batch.block_tables
        starts = np.cumsum([0, *(-(-field.size // ALIGN) * ALIGN for field in fields)])
        total = int(starts[-1])
        if total > self._up.size:
            self._up = cuda.pinned_array(2 * total, np.int32)
            self._device = cuda.device_array(2 * total, np.int32)
        for start, field in zip(starts, fields, strict=False):
            self._up[start : start + field.size] = field.reshape(-1)
        self._device[:total].copy_to_device(self._up[:total])
        views = [self._device[start : start + f.size] for start, f in zip(starts, fields, strict=False)]
        self._fields = {id(field): (field, view) for field, view in zip(fields, views, strict=True)}
        self._batch, self._seqs = batch, views[5]

    def seqs(self, batch: Batch) -> Any:
        """Which sequence each row belongs to, int32 (n_tokens,)."""
        if self._batch is not batch:
            self.send(batch)
        return self._seqs

    def field(self, array: npt.NDArray[np.int32]) -> Any:
        """A field of the batch on the device; another array is sent by itself."""
        if id(array) not in self._fields:
            self._fields[id(array)] = array, cuda.to_device(np.ascontiguousarray(array).reshape(-1))
        return self._fields[id(array)][1]

    def forget(self) -> None:
        """End of the step."""
        self._batch, self._fields = None, {}

    def fetch(self, data: Any, size: int) -> npt.NDArray[np.float32]:
        """The first `size` float32 of a device array; waits until the step is done."""
        if not size:  # a chunk of a prompt that is not its last: nothing to fetch, and nothing to wait for
            return np.empty(0, np.float32)
        if size > self._down.size:
            self._down = cuda.pinned_array(size, np.float32)
        target = self._down[:size]
        data[:size].copy_to_host(target)
        return np.array(target)
