"""From a row of logits to a token, per request. numpy only; a request's choice depends on nothing but its own row,
its own history and its own generator, so batch neighbours cannot change it.

Order: logit bias, penalties, grammar mask, temperature, then top-k, typical, top-p, min-p over what is left, then one
draw. (Temperature comes first, as in transformers and vLLM; llama.cpp applies it last.) Ties go to the lowest id.
Reported logprobs are log-softmax of the raw logits, before all of this.

Out-of-range settings are refused by `SamplingParams`. The chain is cut to at least one token at every stage.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgellm.config import SamplingParams
from edgellm.errors import EdgeLLMError, GrammarError, RequestError

__all__ = ["Distribution", "Grammar", "Sampler", "log_softmax_at", "top_ids"]

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the division would overflow and the draw could not differ."""


class Grammar(Protocol):
    """What `SamplingParams.grammar` makes for each request: a matcher that masks tokens."""

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_] | None:
        """Tokens that may come next, bool (vocab_size,); None when all may. End tokens count as tokens."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token. True when the grammar is complete and only an end token could follow."""

    def roll_back(self, n: int) -> None:
        """Take back the last n accepted tokens (guesses that were only supposed)."""


@dataclass(frozen=True)
class Distribution:
    """What may be drawn: ids and their probabilities (float64, sum 1)."""

    ids: Ids
    probs: npt.NDArray[np.float64]


class Sampler:
    """One request's sampling state: generator, penalty window, Mirostat's mu, grammar."""

    def __init__(self, params: SamplingParams, history: Iterable[int] = ()):
        self.params = params
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self.rng = np.random.Generator(np.random.PCG64(abs(self.seed) * 2 + (self.seed < 0)))
        self.grammar: Grammar | None = params.grammar() if params.grammar else None
        self.mu = 2.0 * params.mirostat_tau
        self.greedy = params.temperature < GREEDY_BELOW
        self._history = list(history)
        self._supposed = 0
        self._drawn = 1.0
        self._penalised = params.repeat_last_n != 0 and (
            params.repeat_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        bias = params.logit_bias or {}
        only_less = not self._penalised and not self.grammar and all(by <= 0 for by in bias.values())
        self._disliked = frozenset(bias) if only_less else None
        """Tokens with a bias against them, where nothing else changes logits; None where something does."""

    def sample(self, logits: Floats, pick: tuple[float, int] | None = None) -> int:
        """The next token for raw logits (vocab,); does not advance. `pick`: the largest logit and its id, where they
        are known. RequestError for NaN or +inf, or nothing left."""
        if self.greedy:
            if (likeliest := self._unless_biased(logits, pick)) is not None:
                return likeliest
            ids, adjusted = self._adjusted(logits)
            best = int(np.argmax(adjusted))
            _check(float(adjusted[best]))
            return best if ids is None else int(ids[best])
        return self.draw(self.distribution(logits))

    def distribution(self, logits: Floats) -> Distribution:
        """What `sample` draws from; one point when greedy."""
        ids, adjusted = self._adjusted(logits)
        _check(float(adjusted.max()))
        if self.greedy:
            found = Distribution(np.array([np.argmax(adjusted)]), np.ones(1))
        else:
            scaled = adjusted / np.float32(self.params.temperature)
            found = self._mirostat(scaled) if self.params.mirostat == 2 else _cut(scaled, self.params)
        return found if ids is None else Distribution(ids[found.ids], found.probs)

    def draw(self, distribution: Distribution) -> int:
        """One token; takes exactly one number from the generator."""
        token_id, self._drawn = _pick(distribution, self.rng.random())
        return token_id

    def peek(self, n: int) -> npt.NDArray[np.float64]:
        """The next n numbers that `draw` will use; they stay in the generator."""
        if self.greedy:
            return np.zeros(n)
        state = self.rng.bit_generator.state
        numbers = self.rng.random(n)
        self.rng.bit_generator.state = state
        return numbers

    def guess(self, logits: Floats, number: float) -> int | None:
        """What `sample` would say if these were the target's logits and `number` the one it draws. None where they
        leave nothing to choose from: a draft may know fewer tokens."""
        try:
            return _pick(self.distribution(logits), number)[0]
        except EdgeLLMError:
            return None

    def suppose(self, token_id: int) -> bool:
        """Take a guess into history and grammar, until `take_back`. True when the grammar is complete."""
        self._history.append(token_id)
        self._supposed += 1
        return self.grammar.accept(token_id) if self.grammar else False

    def take_back(self) -> None:
        """Forget all that was supposed."""
        if self._supposed:
            del self._history[-self._supposed :]
            if self.grammar:
                self.grammar.roll_back(self._supposed)
        self._supposed = 0

    def advance(self, token_id: int) -> bool:
        """Take a chosen token into the state. True when the grammar is complete."""
        if self.params.mirostat == 2 and not self.greedy:
            surprise = -math.log2(max(self._drawn, 1e-300))
            self.mu -= self.params.mirostat_eta * (surprise - self.params.mirostat_tau)
        self._history.append(token_id)
        return self.grammar.accept(token_id) if self.grammar else False

    def _unless_biased(self, logits: Floats, pick: tuple[float, int] | None) -> int | None:
        """The likeliest token where nothing but a bias against others could change which it is: no row is copied to add
        it, none is read where it is known. None where that is not so."""
        disliked = self._disliked
        if disliked is None or not all(0 <= i < len(logits) for i in disliked):  # `_adjusted` refuses unknown ids
            return None
        if pick is None:
            best = int(np.argmax(logits))  # of a NaN, if there is one
            pick = float(logits[best]), best
        if pick[1] in disliked:
            return None
        _check(pick[0])
        return pick[1]

    def _adjusted(self, logits: Floats) -> tuple[Ids | None, Floats]:
        """Logits after bias, penalties and grammar; the caller's row is left alone. Where the grammar leaves few
        tokens: their ids, rising, and their logits alone, so that nothing later sorts a whole vocabulary of -inf."""
        params = self.params
        if params.logit_bias or self._penalised:
            logits = logits.copy()
        for token_id, bias in (params.logit_bias or {}).items():
            if not 0 <= token_id < len(logits):
                raise RequestError(f"logit_bias names token {token_id}, the vocabulary has {len(logits)}")
            logits[token_id] += bias
        if self._penalised:
            self._penalise(logits)
        if not self.grammar or (allowed := self.grammar.allowed(len(logits))) is None:
            return None, logits
        num_allowed = int(np.count_nonzero(allowed))
        if not num_allowed:
            raise GrammarError("the grammar allows no token here")
        if num_allowed > len(logits) // 4:
            return None, np.where(allowed, logits, np.float32(-np.inf))
        ids = np.flatnonzero(allowed)
        return ids, logits[ids]

    def _penalise(self, logits: Floats) -> None:
        """Repeat penalty divides positive logits and multiplies others; presence and frequency are subtracted."""
        last_n = self.params.repeat_last_n
        window = self._history if last_n < 0 else self._history[-last_n:]
        counts = Counter(t for t in window if t < len(logits))
        if not counts:
            return
        ids = np.fromiter(counts.keys(), np.int64, len(counts))
        times = np.fromiter(counts.values(), np.float32, len(counts))
        seen = logits[ids]
        penalty = np.float32(self.params.repeat_penalty)
        seen = np.where(seen > 0, seen / penalty, seen * penalty)
        logits[ids] = seen - times * np.float32(self.params.frequency_penalty) - self.params.presence_penalty

    def _mirostat(self, logits: Floats) -> Distribution:
        """Mirostat 2: keep tokens whose surprise -log2 p is at most mu (the likeliest always)."""
        ids = top_ids(logits, len(logits))
        probs = _softmax(logits[ids])
        keep = max(1, int(np.count_nonzero(-np.log2(np.maximum(probs, 1e-300)) <= self.mu + 1e-6)))
        return Distribution(ids[:keep], probs[:keep] / probs[:keep].sum())


def top_ids(logits: Floats, k: int) -> Ids:
    """Ids of the k largest logits, falling, ties by lowest id. Cost near one pass for small k."""
    n = len(logits)
    if k <= 0:
        return np.zeros(0, np.int64)
    if k >= n:
        return np.argsort(-logits, kind="stable")
    group = 64
    whole = n // group
    if k < whole // 4:
        # At least k logits reach the k-th largest group maximum, so no other can be among the top k.
        maxima = logits[: whole * group].reshape(group, whole).max(axis=0)  # strided groups: whole vectors at a time
        bound = np.partition(maxima, whole - k)[whole - k]
    else:
        bound = np.partition(logits, n - k)[n - k]
    ids = np.flatnonzero(logits >= bound)
    return ids[np.lexsort((ids, -logits[ids]))][:k]


def log_softmax_at(logits: Floats, ids: Ids) -> npt.NDArray[np.float64]:
    """Log-softmax of raw logits (vocab,) at some ids, in float64."""
    top = float(logits.max())
    total = math.log(float(np.exp(logits - np.float32(top), dtype=np.float32).sum(dtype=np.float64)))
    return logits[ids].astype(np.float64) - top - total


def _pick(distribution: Distribution, number: float) -> tuple[int, float]:
    """The token at `number` (0 .. 1) of the cumulated probabilities, and its probability."""
    cumulative = np.cumsum(distribution.probs)
    at = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    at = min(at, len(cumulative) - 1)
    return int(distribution.ids[at]), float(distribution.probs[at])


def _check(top: float) -> None:
    """Refuse logits whose largest is `top`."""
    if math.isnan(top) or top == math.inf:
        raise RequestError("the model's logits are not numbers (NaN or infinite); the answer ends here")
    if top == -math.inf:
        raise RequestError("no token is left to choose from: every logit is -inf")


def _softmax(logits: Floats) -> npt.NDArray[np.float64]:
    exp = np.exp((logits - logits.max()).astype(np.float64))
    return np.asarray(exp / exp.sum())


def _cut(logits: Floats, params: SamplingParams) -> Distribution:
    """top-k, typical, top-p, min-p on logits that temperature has scaled."""
    n = len(logits)
    k = params.top_k if 0 < params.top_k < n else n
    if k == n and params.typical_p >= 1.0:
        if params.top_p >= 1.0 and params.min_p <= 0.0:
            return Distribution(np.arange(n), _softmax(logits))
        ids, probs = _largest_mass(logits, params.top_p)
    else:
        ids = top_ids(logits, k)
        probs = _softmax(logits[ids])
    if params.typical_p < 1.0:
        ids, probs = _typical(ids, probs, params.typical_p)
    if params.top_p < 1.0:
        keep = int(np.searchsorted(np.cumsum(probs), params.top_p - 1e-12)) + 1
        ids, probs = ids[:keep], probs[:keep]
    if params.min_p > 0.0:
        keep_mask = probs >= params.min_p * probs.max()
        ids, probs = ids[keep_mask], probs[keep_mask]
    return Distribution(ids, probs / probs.sum())


def _largest_mass(logits: Floats, mass: float) -> tuple[Ids, npt.NDArray[np.float64]]:
    """The likeliest tokens with at least `mass` of the whole vocabulary's probability, without sorting it all."""
    probs = np.exp(logits - logits.max(), dtype=np.float32)
    total = float(probs.sum(dtype=np.float64))
    k = 256
    while True:
        ids = top_ids(logits, k)
        kept = probs[ids].astype(np.float64) / total
        if len(ids) == len(logits) or kept.sum() >= mass:
            return ids, kept
        k *= 16


def _typical(ids: Ids, probs: npt.NDArray[np.float64], mass: float) -> tuple[Ids, npt.NDArray[np.float64]]:
    """Locally typical sampling: tokens whose surprise is nearest the entropy, up to `mass`; back in falling order."""
    surprise = -np.log(np.maximum(probs, 1e-300))
    order = np.argsort(np.abs(surprise - float((probs * surprise).sum())), kind="stable")
    keep = int(np.searchsorted(np.cumsum(probs[order]), mass - 1e-12)) + 1
    chosen = np.sort(order[:keep])
    return ids[chosen], probs[chosen] / probs[chosen].sum()
