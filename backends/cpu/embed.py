"""Embedding rows straight from the (quantised) table: gathered and dequantised in numpy before the tape runs.

A step needs one row per token, so this is microseconds of work; the table itself is never expanded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import Batch
from edgellm.backends.cpu.tape import Buf, Tape
from edgellm.backends.dequant import dequantise
from edgellm.quants import QTensor

__all__ = ["record_embed"]


def record_embed(tape: Tape, table: QTensor, ids: npt.NDArray[np.int32]) -> Buf:
    """Rows of a (vocab, dim) table: (n_tokens, dim)."""
    count = tape.count(ids)
    out: npt.NDArray[Any] = np.zeros((count, table.shape[1]), np.float32)

    def fill(batch: Batch) -> None:
        n = tape.loaded(count)
        out[:n] = dequantise(table.data[ids[:n]], table.type).reshape(n, -1)

    tape.replay.append(fill)
    return tape.external(out, count, table.shape[1])
