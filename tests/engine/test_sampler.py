"""Samplers against arithmetic done by hand, and the field cases B22 to B25."""

from __future__ import annotations

import time

import numpy as np
import pytest

from edgellm.config import EngineConfig, SamplingParams
from edgellm.engine.sampler import Sampler, log_softmax_at, top_ids
from edgellm.errors import EdgeLLMError, RequestError
from tests.support.scripted import EOS, hash_script, scripted_llm

ONE_TO_FOUR = np.array([1, 2, 3, 4], np.float32)
SOFTMAX = [0.0321, 0.0871, 0.2369, 0.6439]
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


def frequencies(logits: np.ndarray, draws: int = 20_000, **params: object) -> np.ndarray:
    sampler = Sampler(SamplingParams(**{**OFF, "seed": 5, **params}))  # type: ignore[arg-type]
    counts = np.zeros(len(logits))
    for _ in range(draws):
        counts[sampler.sample(logits)] += 1
    return counts / draws


def probabilities(logits: np.ndarray, **params: object) -> np.ndarray:
    found = Sampler(SamplingParams(**{**OFF, **params})).distribution(logits)  # type: ignore[arg-type]
    out = np.zeros(len(logits))
    out[found.ids] = found.probs
    return out


def test_b22_temperature_and_seed() -> None:
    def answers(**params: object) -> list[int]:
        with scripted_llm(hash_script) as llm:
            return llm.generate("abc", SamplingParams(max_tokens=32, **params))[0].ids  # type: ignore[arg-type]

    assert answers(temperature=0, seed=1) == answers(temperature=0, seed=2)
    assert answers(temperature=0.8, seed=42) == answers(temperature=0.8, seed=42)
    assert answers(temperature=0.8, seed=42) != answers(temperature=0.8, seed=43)
    assert answers(temperature=0.8) != answers(temperature=0.8)
    plain = answers(temperature=0)
    assert answers(temperature=1e-9) == answers(temperature=0, top_k=0, top_p=0.0, min_p=1.0) == plain
    for bad in (-1, float("nan"), "0.5", None):
        with pytest.raises(RequestError, match="temperature"):
            SamplingParams(temperature=bad)  # type: ignore[arg-type]


def test_b22_a_reported_seed_reproduces_the_run() -> None:
    with scripted_llm(hash_script) as llm:
        first = llm.generate("abc", SamplingParams(max_tokens=16))[0]
        again = llm.generate("abc", SamplingParams(max_tokens=16, seed=first.timings["seed"]))[0]
    assert again.ids == first.ids


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_b22_ties_go_to_the_lowest_id(temperature: float) -> None:
    assert Sampler(SamplingParams(temperature=temperature)).sample(np.array([1, 5, 5, 2], np.float32)) == 1
    assert top_ids(np.array([5, 1, 5, 5], np.float32), 2).tolist() == [0, 2]
    flat = np.zeros(1000, np.float32)
    assert top_ids(flat, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("top_k", [0, -1, 4, 10**9])
def test_b23_top_k_off_or_over_the_vocabulary(top_k: int) -> None:
    assert np.abs(frequencies(ONE_TO_FOUR, top_k=top_k) - SOFTMAX).max() < 0.015


@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}, {"typical_p": 0.0, "top_k": 1}]
)
def test_b23_the_narrowest_settings_leave_one_token(params: dict[str, float]) -> None:
    assert probabilities(ONE_TO_FOUR, **params).tolist() == [0, 0, 0, 1]


def test_b23_cuts_by_hand() -> None:
    two = np.array([0, 0, 0.2369, 0.6439]) / (0.2369 + 0.6439)
    assert np.abs(probabilities(ONE_TO_FOUR, top_k=2) - two).max() < 1e-3
    assert np.abs(probabilities(ONE_TO_FOUR, top_p=0.65) - two).max() < 1e-3  # 0.6439 alone is not enough
    assert np.abs(probabilities(ONE_TO_FOUR, min_p=0.3) - two).max() < 1e-3  # 0.3 x 0.6439 = 0.193
    half = np.exp([2, 4, 6, 8]) / np.exp([2, 4, 6, 8]).sum()
    assert np.abs(probabilities(ONE_TO_FOUR, temperature=0.5) - half).max() < 1e-6
    # Typical: surprises are 3.44, 2.44, 1.44, 0.44, entropy 0.95; the nearest are 3 (0.50) and 2 (0.49).
    assert np.flatnonzero(probabilities(ONE_TO_FOUR, typical_p=0.5)).tolist() == [2, 3]


@pytest.mark.parametrize("top_p", [1.5, -0.1, float("nan")])
def test_b23_top_p_out_of_range_is_refused(top_p: float) -> None:
    with pytest.raises(RequestError, match="top_p"):
        SamplingParams(top_p=top_p)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"mirostat": 2}])
@pytest.mark.parametrize("bad", [[1, np.nan, 2], [1, np.inf, 2], [-np.inf] * 3])
def test_b23_logits_that_are_no_numbers(params: dict[str, float], bad: list[float]) -> None:
    with pytest.raises(RequestError):
        Sampler(SamplingParams(**{**OFF, **params})).sample(np.array(bad, np.float32))  # type: ignore[arg-type]


def test_top_ids_equal_a_full_sort() -> None:
    rng = np.random.default_rng(3)
    for n in (1, 63, 64, 500, 5000):
        for logits in (rng.standard_normal(n), rng.integers(0, 4, n)):
            row = logits.astype(np.float32)
            for k in (1, 2, 40, 1000):
                expected = np.lexsort((np.arange(n), -row))[:k]
                assert top_ids(row, k).tolist() == expected.tolist()


def test_b23_top_k_off_is_not_slow_on_a_large_vocabulary() -> None:
    row = np.random.default_rng(0).standard_normal(262144).astype(np.float32)
    sampler = Sampler(SamplingParams(temperature=0.8, top_k=0, top_p=1.0, seed=1))
    began = time.perf_counter()
    for _ in range(20):
        sampler.sample(row)
    assert time.perf_counter() - began < 20 * 0.1  # a hang guard: it takes about 4 ms


def test_b24_penalties() -> None:
    logits = np.array([2.0, -2.0, 0.0], np.float32)
    repeat = Sampler(SamplingParams(**OFF, repeat_penalty=1.25), [0, 1])
    assert np.allclose(repeat._adjusted(logits)[1], [1.6, -2.5, 0.0])
    more = SamplingParams(**OFF, repeat_penalty=1.25, frequency_penalty=0.5, presence_penalty=0.25)
    assert np.allclose(Sampler(more, [0, 0])._adjusted(logits)[1][0], 0.35)
    assert logits.tolist() == [2.0, -2.0, 0.0]


@pytest.mark.parametrize("last_n, first", [(4, 96), (0, 100), (-1, 0)])
def test_b24_repeat_last_n(last_n: int, first: int) -> None:
    sampler = Sampler(SamplingParams(**OFF, repeat_penalty=2.0, repeat_last_n=last_n), range(100))
    adjusted = sampler._adjusted(np.ones(100, np.float32))[1]
    assert np.flatnonzero(adjusted != 1).tolist() == list(range(first, 100))


def test_b24_penalties_see_generated_tokens() -> None:
    sampler = Sampler(SamplingParams(temperature=0, repeat_penalty=2.0, repeat_last_n=1), [])
    logits = np.array([1.0, 0.9], np.float32)
    chosen = []
    for _ in range(4):
        chosen.append(sampler.sample(logits))
        sampler.advance(chosen[-1])
    assert chosen == [0, 1, 0, 1]


def test_b24_mirostat_keeps_its_mu() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    params = SamplingParams(**OFF, mirostat=2, mirostat_tau=1.0, mirostat_eta=0.1, seed=0)
    seen = set()
    for seed in range(20):
        sampler = Sampler(SamplingParams(**{**vars(params), "seed": seed}))
        assert sampler.mu == 2.0
        found = sampler.distribution(logits)
        assert found.ids.tolist() == [0, 1]
        assert np.allclose(found.probs, [2 / 3, 1 / 3])
        token = sampler.sample(logits)
        sampler.advance(token)
        assert sampler.mu == pytest.approx({0: 2.041504, 1: 1.941504}[token], abs=1e-6)
        seen.add(token)
    assert seen == {0, 1}


def test_b25_logprobs_are_log_softmax_of_the_raw_logits() -> None:
    with scripted_llm(hash_script) as llm:
        params = SamplingParams(max_tokens=4, logprobs=3, temperature=0.7, top_k=5, repeat_penalty=1.3, seed=9)
        [done] = llm.generate("🦙 ab", params)
        ids = llm.tokenize("🦙 ab") + done.ids
        raw = llm.logits(ids).astype(np.float64)
    assert done.logprobs is not None and len(done.logprobs) == len(done.ids) == 4
    for i, entry in enumerate(done.logprobs):
        row = raw[len(ids) - 5 + i]
        exact = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert np.isclose(np.exp(exact).sum(), 1)
        assert entry.id == done.ids[i]
        assert entry.logprob == pytest.approx(exact[entry.id], abs=1e-3)
        assert [t.id for t in entry.top] == np.argsort(-exact)[:3].tolist()
        assert [t.logprob for t in entry.top] == sorted((t.logprob for t in entry.top), reverse=True)
        assert all(t.logprob <= 0 and t.logprob == pytest.approx(exact[t.id], abs=1e-3) for t in entry.top)
    assert b"".join(e.bytes for e in done.logprobs).decode("utf-8", "replace") == done.text


def test_b25_as_many_as_asked_for() -> None:
    with scripted_llm("ok") as llm:
        [none] = llm.generate("x", SamplingParams(temperature=0))
        [chosen] = llm.generate("x", SamplingParams(temperature=0, logprobs=0))
        [twenty] = llm.generate("x", SamplingParams(temperature=0, logprobs=20))
    assert none.logprobs is None
    assert [len(e.top) for e in chosen.logprobs or ()] == [0, 0]
    assert [len(e.top) for e in twenty.logprobs or ()] == [20, 20]
    with pytest.raises(RequestError, match="logprobs"):
        SamplingParams(logprobs=21)


def test_log_softmax_survives_large_logits() -> None:
    row = np.array([1e4, 1e4 - 1, -1e4], np.float32)
    assert log_softmax_at(row, np.array([0, 1]))[1] == pytest.approx(-1.3132617, abs=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_a_greedy_choice_under_a_bias_is_the_largest_sum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 4, 40).astype(np.float32)  # many ties
    for signs in ([-1.0], [-1.0, 1.0], [-np.inf]):
        ids = rng.choice(40, 12, replace=False)
        bias = {int(i): float(rng.choice(signs) * (2 if np.isfinite(signs[0]) else 1)) for i in ids}
        total = logits.copy()
        total[list(bias)] += np.array(list(bias.values()), np.float32)
        given = logits.copy()
        assert Sampler(SamplingParams(temperature=0, logit_bias=bias)).sample(given) == int(np.argmax(total))
        assert (given == logits).all()


def test_logit_bias_and_its_limits() -> None:
    with scripted_llm("aaaa") as llm:
        [done] = llm.generate(
            "x", SamplingParams(temperature=0, max_tokens=3, logit_bias={ord("a"): -100, ord("b"): 9})
        )
        assert done.text == "bbb"
        with pytest.raises(RequestError, match="token 512"):
            llm.generate("x", SamplingParams(logit_bias={512: 1.0}))


class Letters:
    """A grammar: the letters of a word, then the end."""

    def __init__(self, word: str):
        self.word, self.at = word, 0

    def allowed(self, vocab_size: int) -> np.ndarray:
        mask = np.zeros(vocab_size, bool)
        mask[ord(self.word[self.at]) if self.at < len(self.word) else EOS] = True
        return mask

    def accept(self, token_id: int) -> bool:
        self.at += 1
        return self.at == len(self.word)

    def roll_back(self, n: int) -> None:
        self.at -= n


def test_a_grammar_masks_tokens_and_ends_the_answer() -> None:
    with scripted_llm(hash_script) as llm:
        first, second = llm.generate(["a", "b"], SamplingParams(temperature=0.8, grammar=lambda: Letters("yes")))
        assert (first.text, second.text) == ("yes", "yes")
        assert first.finish_reason == "stop"

        def broken() -> Letters:
            return Letters("")

        with pytest.raises(EdgeLLMError, match="choosing a token failed"):
            llm.generate("x", SamplingParams(max_tokens=2, grammar=lambda: type("G", (), {})()))
        assert llm.generate("x", SamplingParams(max_tokens=2, grammar=broken))[0].ids == []


@pytest.mark.parametrize(
    "name, value",
    [
        # float32 ends at 3.4e38: https://en.wikipedia.org/wiki/Single-precision_floating-point_format
        ("temperature", 1e308),
        ("presence_penalty", -1e308),
        ("repeat_penalty", 1e-308),
        ("logprobs", "x"),
        ("logprobs", True),
        ("logit_bias", []),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: float("inf")}),
        ("grammar", "root ::= [0-9]"),
        ("stop", 5),
        ("stop", ["a", 5]),
    ],
)
def test_wrong_values_are_named_where_they_are_given(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
def test_the_ends_of_the_ranges_leave_a_distribution() -> None:
    for ends in ({"temperature": 1e30}, {"temperature": 1e-300}, {"repeat_penalty": 1e30}, {"repeat_penalty": 1e-30}):
        found = probabilities(ONE_TO_FOUR, **{"presence_penalty": 1e30, "frequency_penalty": -1e30, **ends})
        assert np.isfinite(found).all() and abs(found.sum() - 1) < 1e-6
    assert SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop=None).stop == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ctx", "memory", "max_batch_tokens", "max_seqs", "max_waiting", "swap_space"])
@pytest.mark.parametrize("value", [-1, 1.5, "8G"])
def test_wrong_sizes_are_named_where_they_are_given(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        EngineConfig(**{"ctx": 16, name: value})  # type: ignore[arg-type]
