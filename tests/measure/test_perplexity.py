"""The windows, the ids that count and the formula, against a model whose probabilities are known by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgellm.errors import RequestError
from edgellm.measure.perplexity import score_windows


def test_uniform_logits_give_the_size_of_the_vocabulary() -> None:
    result = score_windows(range(40), 16, None, lambda window: np.zeros((16, 37), np.float32))
    assert math.isclose(result.ppl, 37.0, rel_tol=1e-12)
    assert result.n_tokens == 2 * 7, "ids 9 .. 15 of two whole windows; the third is short"


def test_each_scored_id_is_read_from_the_row_before_it() -> None:
    ids = [5, 3, 8, 1, 9, 2, 7, 4]
    rows = np.random.default_rng(3).normal(size=(8, 10)).astype(np.float32)
    log_p = rows.astype(np.float64) - np.log(np.exp(rows.astype(np.float64)).sum(axis=1, keepdims=True))
    expected = math.exp(-sum(log_p[i - 1, ids[i]] for i in (5, 6, 7)) / 3)
    assert math.isclose(score_windows(ids, 8, None, lambda window: rows).ppl, expected, rel_tol=1e-9)


def test_the_begin_token_replaces_the_first_id_of_each_window() -> None:
    seen: list[list[int]] = []

    def logits(window):
        seen.append(list(window))
        return np.zeros((4, 10), np.float32)

    score_windows([1, 2, 3, 4, 5, 6, 7, 8, 9], 4, 0, logits)
    assert seen == [[0, 2, 3, 4], [0, 6, 7, 8]]


def test_a_text_shorter_than_a_window_is_an_error_with_both_numbers() -> None:
    with pytest.raises(RequestError, match=r"7 tokens.*window of 8"):
        score_windows(range(7), 8, None, lambda window: np.zeros((8, 10), np.float32))
