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
    out: npt.NDArray[Any] = np.zeros((len(ids), table.shape[1]), np.float32)

    def fill(batch: Batch) -> None:
        out[:] = dequantise(table.data[ids], table.type).reshape(out.shape)

    tape.replay.append(fill)
    return tape.external(out)
