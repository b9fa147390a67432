"""Perplexity over windows of a text, by llama-perplexity's rule, so that figures can be compared with published ones.

The text is tokenised once. Each window of `ctx` ids stands alone; where the model adds a begin token, that replaces
the window's first id. Only the second half is scored (ids ctx/2 + 1 .. ctx - 1), so each scored id has context; a short
last window is dropped. Perplexity = exp(-mean log p(id | ids before it in its window)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgellm.errors import RequestError

if TYPE_CHECKING:
    from edgellm.llm import LLM

__all__ = ["SHORTEST", "Perplexity", "measure_perplexity", "score_windows"]

SHORTEST = 4
"""Tokens of the smallest window."""

Logits = Callable[[Sequence[int]], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Perplexity:
    """`n_tokens`: ids scored."""

    ppl: float
    n_tokens: int
    ctx: int


def score_windows(
    ids: Sequence[int],
    ctx: int,
    bos: int | None,
    logits: Logits,
    progress: Callable[[int, int, float], None] | None = None,
) -> Perplexity:
    """Perplexity of `ids`. `logits(window)` gives float32 (ctx, vocab). `progress(done, total, ppl so far)`."""
    if ctx < SHORTEST:
        raise RequestError(f"a window must hold {SHORTEST} tokens or more, not {ctx}")
    n_windows = len(ids) // ctx
    if n_windows == 0:
        raise RequestError(f"the text has {len(ids)} tokens, fewer than one window of {ctx}; choose a smaller --ctx")
    first = ctx // 2 + 1
    total, n_tokens = 0.0, 0
    for w in range(n_windows):
        window = [int(i) for i in ids[w * ctx : (w + 1) * ctx]]
        if bos is not None:
            window[0] = bos
        rows = logits(window)[first - 1 : ctx - 1].astype(np.float64)
        top = rows.max(axis=1)
        log_sum = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
        total += float((log_sum - rows[np.arange(len(rows)), window[first:]]).sum())
        n_tokens += len(rows)
        if progress:
            progress(w + 1, n_windows, math.exp(total / n_tokens))
    return Perplexity(math.exp(total / n_tokens), n_tokens, ctx)


def measure_perplexity(
    llm: LLM, text: str, ctx: int = 512, progress: Callable[[int, int, float], None] | None = None
) -> Perplexity:
    """Perplexity of a loaded model on `text`."""
    bos = llm.tokenizer.bos_id if llm.tokenizer.add_bos else None
    return score_windows(llm.tokenize(text), ctx, bos, llm.logits, progress)
