"""Sampling with guesses draws from the target's own distribution: 20,000 seeds against what `llm.logits` says.

The thorough run has one setting (half a minute); all of them: `pytest -m "" tests/engine/test_distribution.py`. The
default run has tests/engine/test_speculate.py: the same seed gives the same answer with guesses and without.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgellm import LLM, SamplingParams
from edgellm.config import EngineConfig
from edgellm.engine.engine import Engine
from edgellm.opening import Settings, open_engine
from tests.support.guessing import always_guess
from tests.support.tiny import tiny_gguf

pytestmark = pytest.mark.thorough

DRAWS, BATCH = 20_000, 250
PROMPT, END = [5, 6], 0
"""END is ruled out by `ignore_eos`."""
Table = npt.NDArray[np.float64]


def processed(logits: Table, temperature: float, top_k: int, top_p: float) -> Table:
    """Probabilities after temperature, top-k and top-p, written down anew."""
    probs = np.exp(logits / temperature - (logits / temperature).max())
    probs[END] = 0.0
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = order[: top_k or len(order)]
    within = probs[kept] / probs[kept].sum()
    n = 1
    while n < len(kept) and sum(within[:n]) < top_p:
        n += 1
    result = np.zeros(len(probs))
    result[kept[:n]] = within[:n] / within[:n].sum()
    return result


def joint(llm: LLM, settings: dict[str, Any]) -> Table:
    """Probability of each pair of first tokens, (vocab, vocab)."""
    first = processed(llm.logits(PROMPT)[-1].astype(np.float64), **settings)
    table = np.zeros((len(first), len(first)))
    for token in np.flatnonzero(first):
        logits = llm.logits([*PROMPT, int(token)])[-1].astype(np.float64)
        table[token] = first[token] * processed(logits, **settings)
    return table


def drawn(engine: Engine, settings: dict[str, Any]) -> Counter[tuple[int, int]]:
    """How often each pair came first in 20,000 answers, seeds 0, 1, 2 ..."""
    counts: Counter[tuple[int, int]] = Counter()
    for start in range(0, DRAWS, BATCH):
        for seed in range(start, start + BATCH):
            engine.add_request(PROMPT, SamplingParams(max_tokens=3, seed=seed, ignore_eos=True, **settings))
        while engine.has_work:
            for _, event in engine.step():
                if event.completion:
                    counts[event.completion.ids[0], event.completion.ids[1]] += 1
    return counts


def chi_squared(counts: Counter[tuple[int, int]], expected: Table, cell: npt.NDArray[np.int64]) -> tuple[float, int]:
    """Statistic and number of cells; `cell` (vocab, vocab): which one each pair counts in."""
    wanted, seen = np.zeros(cell.max() + 1), np.zeros(cell.max() + 1)
    np.add.at(wanted, cell, expected * DRAWS)
    for pair, n in counts.items():
        seen[cell[pair]] += n
    used = wanted > 0
    assert not seen[~used].any(), "a token was drawn that the settings rule out"
    assert wanted[used].min() >= 5, "a cell is too small for the test"
    return float(((seen - wanted)[used] ** 2 / wanted[used]).sum()), int(used.sum())


def top_eight(expected: Table) -> npt.NDArray[np.int64]:
    """Cells of the first token's likeliest 8 and all others, by the second's likeliest 8 (after that first) and all
    others: 81."""
    rows = np.full(len(expected), 8)
    rows[np.argsort(-expected.sum(axis=1))[:8]] = range(8)
    cell = np.empty(expected.shape, np.int64)
    for row in range(9):
        columns = np.full(len(expected), 8)
        columns[np.argsort(-expected[rows == row].sum(axis=0))[:8]] = range(8)
        cell[rows == row] = 9 * row + columns
    return cell


def upper_thousandth(n: int) -> float:
    """The value that chi-squared of n degrees exceeds once in a thousand (Wilson and Hilferty 1931)."""
    return n * (1 - 2 / (9 * n) + 3.0902 * (2 / (9 * n)) ** 0.5) ** 3


CASES = [
    ({"temperature": 2.0, "top_k": 5, "top_p": 1.0}, 25),
    pytest.param({"temperature": 4.0, "top_k": 5, "top_p": 1.0}, 25, marks=pytest.mark.slow),
    pytest.param({"temperature": 3.0, "top_k": 5, "top_p": 0.9}, None, marks=pytest.mark.slow),
    pytest.param({"temperature": 2.0, "top_k": 5, "top_p": 0.8}, None, marks=pytest.mark.slow),
    pytest.param({"temperature": 5.0, "top_k": 0, "top_p": 1.0}, 81, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("settings, cells", CASES)
def test_the_distribution_is_the_targets(settings: dict[str, Any], cells: int | None, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"context_length": 64, "chat_template": None}
    target = tiny_gguf(tmp_path / "target.gguf", **shape)
    draft = tiny_gguf(tmp_path / "draft.gguf", n_layers=1, **shape)
    with LLM(target, backend="cpu", memory=1 << 30) as llm:
        expected = joint(llm, settings)
    config = EngineConfig(ctx=64, memory=1 << 30, max_seqs=BATCH)
    opened = open_engine(target, Settings(config, "cpu", draft=str(draft)))
    assert opened.engine.speculator is not None
    always_guess(opened.engine.speculator)
    counts, report = drawn(opened.engine, settings), opened.engine.stats()["speculation"]
    opened.engine.close()
    assert report["drafted"] == DRAWS and 0.05 < report["acceptance"] < 0.95
    every_pair = np.arange(expected.size).reshape(expected.shape)
    statistic, n = chi_squared(counts, expected, every_pair if settings["top_k"] else top_eight(expected))
    assert cells in (None, n)
    assert statistic < upper_thousandth(n - 1)
