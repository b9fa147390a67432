"""Texts to vectors: bounded, in order, each of length 1."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.errors import CancelledError, RequestError

__all__ = ["Embedded", "embed"]

MAX_INPUTS = 2048
BATCH = 32
"""Texts that are in the engine's queue at once: other requests come in between."""


@dataclass
class Embedded:
    """`vectors`: float32 (n, dim), rows of length 1. `n_tokens`: of all inputs together."""

    vectors: npt.NDArray[np.float32]
    n_tokens: int
    load_s: float = 0.0


def embed(
    llm: Any,
    inputs: Sequence[str | Sequence[int]],
    *,
    truncate: bool,
    dimensions: int | None = None,
    num_ctx: int | None = None,
    stop: threading.Event | None = None,
) -> Embedded:
    """Vectors of texts or token ids. Too long ones are cut to the context with `truncate`, refused without.

    `dimensions` keeps the first so many and brings the length back to 1. `stop`: set when nobody wants them any more.
    Raises RequestError, CancelledError.
    """
    if len(inputs) > MAX_INPUTS:
        raise RequestError(f"input: {len(inputs)} texts are too many for one request ({MAX_INPUTS} at most)")
    if dimensions is not None and dimensions < 0:
        raise RequestError(f"dimensions must be 1 or more, not {dimensions}")
    limit = min(num_ctx or llm.ctx, llm.ctx)
    rows = [_ids(llm, item, limit, truncate) for item in inputs]
    if not rows:
        return Embedded(np.zeros((0, 0), np.float32), 0)
    batches = []
    for start in range(0, len(rows), BATCH):
        if stop is not None and stop.is_set():
            raise CancelledError("the client went away")
        batches.append(llm.embed(rows[start : start + BATCH]))
    vectors = np.concatenate(batches)
    if dimensions:
        if dimensions > vectors.shape[1]:
            raise RequestError(f"dimensions {dimensions} is above the model's {vectors.shape[1]}")
        vectors = vectors[:, :dimensions]
    return Embedded(_unit(vectors), sum(len(row) for row in rows))


def _ids(llm: Any, item: str | Sequence[int], limit: int, truncate: bool) -> list[int]:
    if isinstance(item, str):
        ids: list[int] = llm.tokenizer.encode(item, special=False)
    else:
        ids = list(item)
        if any(not 0 <= token < llm.tokenizer.vocab_size for token in ids):
            raise RequestError(f"input: token ids must lie between 0 and {llm.tokenizer.vocab_size - 1}")
    if len(ids) <= limit:
        return list(ids)
    if not truncate:
        raise RequestError(f"the input length exceeds the context length: {len(ids)} tokens, {limit} fit")
    return _cut(ids, limit, llm.tokenizer)


def _cut(ids: list[int], limit: int, tokenizer: Any) -> list[int]:
    """The first `limit` ids; the end mark of models that have one stays at the end."""
    last = ids[-1]
    return [*ids[: limit - 1], last] if tokenizer.is_control(last) else ids[:limit]


def _unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    length = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(length, 1e-12), np.float32)
