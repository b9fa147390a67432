"""Speculation changes speed only: same tokens as plain decoding, for any drafter."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import LLM, SamplingParams
from edgellm.engine.answer import Answer
from edgellm.engine.depth import Acceptance, DepthController, Prospect
from edgellm.engine.draft import DraftModel
from edgellm.engine.lookup import PromptLookup
from edgellm.engine.output import Completion
from edgellm.engine.request import Request
from edgellm.engine.speculate import Speculator
from edgellm.errors import DraftPairError
from tests.engine.test_engine import Driver, alone, prompts, same
from tests.support.scripted import VOCAB, ByteTokenizer, ScriptedRunner, hash_script, model_config
from tests.support.tiny import tiny_gguf


class Forced:
    """In the speculator's place: guesses by rule. `kind`: right, wrong, alternating or random."""

    def __init__(self, kind: str, depth: int = 7):
        self.kind, self.depth, self.rng = kind, depth, random.Random(0)
        self.drafted = 0

    def propose(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            request = answer.request
            room = min(self.depth, request.max_tokens - request.num_new_tokens - 1)
            guesses: list[int] = []
            for i, number in enumerate(answer.sampler.peek(max(0, room))):
                right = answer.sampler.guess(hash_script([*request.token_ids, *guesses]), number)
                assert right is not None
                wrong = right % 255 + 1
                pick = {"right": right, "wrong": wrong, "alternating": (right, wrong)[i % 2]}
                guesses.append(pick.get(self.kind, self.rng.randrange(1, 256)))
            request.draft_ids = guesses
            self.drafted += len(guesses)

    def observe(self, results: Any, seconds: float) -> None: ...
    def finished(self, answer: Answer) -> None: ...
    def close(self) -> None: ...
    def snapshot(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("kind", ["right", "wrong", "alternating", "random"])
@pytest.mark.parametrize("windows", [(0,), (48, 0)])
@pytest.mark.parametrize("batch, temperature", [(1, 0.0), (1, 0.9), (8, 0.9)])
def test_any_drafter_gives_the_plain_answer(
    kind: str, windows: tuple[int, ...], batch: int, temperature: float
) -> None:
    driver = Driver(windows, blocks=60, chunk=64)
    driver.engine.speculator = Forced(kind)  # type: ignore[assignment]
    asked = prompts(batch, 90, seed=batch)
    numbers = [driver.add(p, temperature=temperature, max_tokens=40) for p in asked]
    driver.finish()
    for number, prompt in zip(numbers, asked, strict=True):
        assert same(driver.done[number], alone(prompt, windows, temperature=temperature, max_tokens=40))
    assert driver.engine.speculator.drafted > 0  # type: ignore[union-attr]
    if kind == "right" and batch == 1:
        assert len(driver.runner.steps) < 2 + 40 / 8 + 40 // 64 + 2


@pytest.mark.parametrize("swapped", [False, True])
def test_drafts_with_aborts_and_preemption(swapped: bool, tmp_path: Path) -> None:
    driver = Driver((48, 0), blocks=12, ctx=256, chunk=32, swap=tmp_path if swapped else None)
    driver.engine.speculator = Forced("alternating")  # type: ignore[assignment]
    start = driver.free
    asked = prompts(6, 90, seed=5)
    numbers = [driver.add(p, max_tokens=90) for p in asked]
    for _ in range(20):
        driver.step()
    driver.engine.abort(numbers[2])
    driver.finish()
    for i, (number, prompt) in enumerate(zip(numbers, asked, strict=True)):
        if i != 2:
            assert same(driver.done[number], alone(prompt, (48, 0), max_tokens=90))
    assert driver.engine.stats()["preemptions"] > 0
    assert driver.free == start


@pytest.mark.parametrize("params", [{"max_tokens": 11}, {"stop": ("x",)}, {"logit_bias": {0: 48.0}}])
def test_answers_end_inside_an_accepted_run(params: dict[str, Any]) -> None:
    params = {"max_tokens": 60, "temperature": 0.9, **params}
    for seed in range(5):
        driver = Driver()
        driver.engine.speculator = Forced("right")  # type: ignore[assignment]
        number = driver.add([seed + 1] * 9, seed=seed, **params)
        driver.finish()
        plain = alone([seed + 1] * 9, seed=seed, **params)
        assert same(driver.done[number], plain)
        assert driver.done[number].finish_reason == plain.finish_reason


def with_draft_model(script: Any, draft_ctx: int = 512, blocks: int = 100, lookup: bool = False) -> Driver:
    """A driver whose draft is another scripted model."""
    driver = Driver(blocks=100)
    runner = ScriptedRunner(script, model_config(draft_ctx))
    draft = DraftModel(runner, model_config(draft_ctx), [blocks], 32, 512)
    speculator = Speculator(512, PromptLookup() if lookup else None, draft)
    # A clock is no test: every depth is worth it at these costs, so guesses are always made.
    times = speculator.controller.times
    for rows, seconds in enumerate([1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07], start=1):
        for seqs in range(1, 9):
            times.set(seqs, rows + seqs - 1, seconds)
    times.observe = lambda *args: True  # type: ignore[method-assign]
    times.observe_draft = lambda *args: True  # type: ignore[method-assign]
    driver.engine.speculator = speculator
    return driver


def sometimes_wrong(tokens: Sequence[int]) -> np.ndarray:
    return hash_script(tokens if sum(tokens) % 4 else [*tokens, 1])


@pytest.mark.parametrize("script, least", [(hash_script, 0.99), (sometimes_wrong, 0.2)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_model_gives_the_plain_answer(script: Any, least: float, temperature: float) -> None:
    driver = with_draft_model(script)
    asked = prompts(4, 300, seed=1)
    numbers = [driver.add(p, temperature=temperature, max_tokens=50) for p in asked]
    while driver.engine.has_work:
        driver.step()
        driver.engine.speculator.model.check_integrity()  # type: ignore[union-attr]
    for number, prompt in zip(numbers, asked, strict=True):
        assert same(driver.done[number], alone(prompt, temperature=temperature, max_tokens=50))
    report = driver.engine.stats()["speculation"]
    assert report["drafted"] > 50
    assert report["acceptance"] >= least
    assert driver.engine.speculator.model.kv.pools[0].num_free == 100  # type: ignore[union-attr]


def test_the_report_of_a_request() -> None:
    driver = with_draft_model(hash_script)
    number = driver.add([3] * 20, max_tokens=40, temperature=0)
    driver.finish()
    report = driver.done[number].timings["speculation"]
    assert report["drafted"] == report["accepted"] > 20
    assert set(report["by_position"]) == {1.0}
    assert report["mean_accepted"] > 3
    assert report["speedup"] is not None


def test_b33_a_draft_whose_context_is_full_stops_guessing() -> None:
    driver = with_draft_model(hash_script, draft_ctx=64)
    number = driver.add([3] * 20, max_tokens=180, temperature=0)
    driver.finish()
    assert same(driver.done[number], alone([3] * 20, max_tokens=180, temperature=0))
    assert 20 < driver.done[number].timings["speculation"]["drafted"] <= 44


def test_a_draft_without_blocks_or_with_a_failure_only_leaves_plain_decoding() -> None:
    for driver in (with_draft_model(hash_script, blocks=1), with_draft_model(lambda tokens: RuntimeError("boom"))):
        number = driver.add([3] * 40, max_tokens=30, temperature=0)
        driver.finish()
        assert same(driver.done[number], alone([3] * 40, max_tokens=30, temperature=0))


def test_lookup_follows_the_longest_match() -> None:
    lookup = PromptLookup()
    text = [1, 2, 3, 4, 50, 51, 52, 9, 3, 4, 60, 61, 8, 1, 2, 3, 4]
    assert lookup.propose(Request(0, text, 9), 3) == ([50, 51, 52], 4)
    assert lookup.propose(Request(1, [5, 6, 7], 9), 3) == ([], 0)
    assert lookup.propose(Request(2, [7, 8, 7, 8, 7, 8], 9), 5) == ([7, 8, 7, 8, 7], 4)
    assert lookup.propose(Request(3, [7, 8, 9, 5, 7, 8], 9), 2) == ([9, 5], 2)
    lookup.forget(0)


def test_lookup_guesses_a_repeated_text() -> None:
    driver = Driver()
    driver.engine.speculator = Speculator(512, PromptLookup(), None)
    repeating = [7, 8, 9, 10] * 30
    number = driver.add(repeating, max_tokens=200, temperature=0)
    driver.finish()
    assert same(driver.done[number], alone(repeating, max_tokens=200, temperature=0))


def controller(draft_step: float, row: float = 0.05) -> DepthController:
    depths = DepthController(7)
    for rows in range(1, 9):
        depths.times.set(1, rows, 1.0 + row * (rows - 1))
    depths.times.set_draft(draft_step)
    return depths


def one(rate: float, limit: int = 7, costs: bool = True) -> list[Prospect]:
    return [Prospect(rate, limit, costs)]


def test_the_depth_is_the_best_by_the_formula() -> None:
    depths = controller(draft_step=0.1)
    for rate in (0.0, 0.3, 0.5, 0.7, 0.9, 0.99):
        speeds = [sum(rate**i for i in range(k + 1)) / (0.1 * k + 1 + 0.05 * k) for k in range(8)]
        best = max(range(8), key=lambda k: speeds[k])
        expected = best if speeds[best] > 1.03 * speeds[0] else 0
        assert depths.choose(one(rate)) == [expected]


def test_a_slow_draft_is_not_asked_but_for_rare_probes() -> None:
    depths = controller(draft_step=2.0)
    drafted = 0
    for _ in range(1000):
        [depth] = depths.choose(one(0.9))
        drafted += depth > 0
        seconds = 1.0 if not depth else 1 + 0.05 * depth + 2.0 * depth
        depths.account(1, 1 + depth, 1, seconds)
    assert 1 <= drafted <= 10
    assert depths.probe_s <= 0.02 * depths.total_s


def test_limits_and_batches() -> None:
    depths = controller(draft_step=0.0)
    assert depths.choose(one(0.9, 2, costs=False)) == [2]
    assert depths.choose(one(0.9, 0, costs=False)) == [0]
    for rows in range(2, 17):
        depths.times.set(2, rows, 1.0 + 0.05 * (rows - 2))
    likely, unlikely = depths.choose([*one(0.95, costs=False), *one(0.05, costs=False)])
    assert likely >= 5 and unlikely == 0


def test_acceptance_follows_what_happens() -> None:
    acceptance = Acceptance(0.7)
    assert acceptance.rate == pytest.approx(0.7)
    for _ in range(30):
        acceptance.observe(drafted=4, accepted=0)
    assert acceptance.rate < 0.02
    for _ in range(30):
        acceptance.observe(drafted=4, accepted=4)
    assert acceptance.rate > 0.95


@pytest.mark.parametrize("windowed", [False, True])
def test_through_real_kernels(windowed: bool, tmp_path: Path) -> None:
    arch = "gemma2" if windowed else "llama"
    shape = {"context_length": 512, "chat_template": None, "window": 40}
    target = tiny_gguf(tmp_path / "target.gguf", arch, **shape)  # type: ignore[arg-type]
    asked = [p[:70] for p in prompts(8, 200, seed=3)]
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=3, logprobs=1, ignore_eos=True)
    answers: list[list[Completion]] = []
    for draft in (None, str(target), "lookup"):
        with LLM(target, backend="cpu", threads=2, memory=1 << 30, draft=draft) as llm:
            answers.append(llm.generate(asked, params) + [llm.generate([p], params)[0] for p in asked[:2]])
    for found in answers[1:]:
        assert [(c.ids, c.logprobs) for c in found] == [(c.ids, c.logprobs) for c in answers[0]]


def test_b33_pairs_that_cannot_work_are_refused_at_load(tmp_path: Path) -> None:
    shape = {"context_length": 64, "chat_template": None}
    target = tiny_gguf(tmp_path / "target.gguf", **shape)  # type: ignore[arg-type]
    import gguf

    tokens = [f.decode() for f in _tokens(gguf.GGUFReader(target))]
    tokens[100] = "changed"
    cases = {
        "text": ({"metadata": {"tokenizer.ggml.tokens": tokens}}, "token 100 is .* and 'changed'"),
        "bos": ({"metadata": {"tokenizer.ggml.bos_token_id": 5}}, "bos_id is 0 in the target and 5"),
        "size": ({"vocab_size": 1200}, "300 and 1200 tokens"),
    }
    for name, (changes, message) in cases.items():
        draft = tiny_gguf(tmp_path / f"{name}.gguf", **{**shape, **changes})  # type: ignore[arg-type]
        with pytest.raises(DraftPairError, match=f"{name}.gguf cannot draft for target.gguf: .*{message}"):
            LLM(target, backend="reference", memory=1 << 30, draft=str(draft))


def _tokens(reader: Any) -> list[bytes]:
    field = reader.fields["tokenizer.ggml.tokens"]
    return [bytes(field.parts[i]) for i in field.data]


@pytest.mark.parametrize("settings", [{"temperature": 1.0, "top_p": 1.0}, {"temperature": 0.7, "top_p": 0.9}])
def test_the_distribution_is_the_targets(settings: dict[str, float]) -> None:
    """Joint distribution of the first two tokens under drafts, against the product of the processed logits."""
    draws, prompt = 20_000, [5, 6, 7]
    table: dict[tuple[int, ...], np.ndarray] = {}

    def logits(tokens: Sequence[int]) -> np.ndarray:
        key = tuple(tokens)
        if key not in table:
            row = hash_script(tokens)
            row[6:] = -50.0  # few tokens, so that cells are full
            table[key] = row / 3
        return table[key]

    def probabilities(tokens: Sequence[int]) -> dict[int, float]:
        row = logits(tokens).astype(np.float64) / settings["temperature"]
        ids = np.argsort(-row)[:5]
        probs = np.exp(row[ids] - row.max())
        probs /= probs.sum()
        keep = int(np.searchsorted(np.cumsum(probs), settings["top_p"] - 1e-9)) + 1 if settings["top_p"] < 1 else 5
        return dict(zip(ids[:keep].tolist(), (probs[:keep] / probs[:keep].sum()).tolist(), strict=True))

    expected: dict[tuple[int, int], float] = {}
    for a, p in probabilities(prompt).items():
        for b, q in probabilities([*prompt, a]).items():
            expected[a, b] = p * q * draws
    counts: Counter[tuple[int, int]] = Counter()
    rng = random.Random(1)
    for seed in range(draws):
        request = Request(0, list(prompt), 10)
        params = SamplingParams(max_tokens=2, top_k=5, seed=seed, **settings)
        answer = Answer(request, params, _NoEnd())
        # A guess that is right, likely or random, by turns.
        guess = rng.choice([1, 2, 3, 4, 5])
        rows = np.stack([logits(prompt), logits([*prompt, guess])])
        tokens = answer.accept(rows, [guess])
        if len(tokens) == 1:
            tokens += answer.accept(logits([*prompt, *tokens])[None], [])
        counts[tokens[0], tokens[1]] += 1
    assert counts.keys() <= expected.keys()
    assert min(expected.values()) >= 5 or settings["top_p"] < 1
    cells = [(counts[k], e) for k, e in expected.items() if e >= 5]
    chi2 = sum((o - e) ** 2 / e for o, e in cells)
    # Upper 0.1% point of chi-squared (Wilson-Hilferty).
    n = len(cells) - 1
    assert chi2 < n * (1 - 2 / (9 * n) + 3.09 * (2 / (9 * n)) ** 0.5) ** 3


class _NoEnd(ByteTokenizer):
    eog_ids = frozenset({VOCAB - 1})


def test_check_pair_gives_a_verdict_with_reasons(tmp_path: Path) -> None:
    from edgellm.measure.pair import weigh_pair

    target = tiny_gguf(tmp_path / "target.gguf", context_length=128)
    draft = tiny_gguf(tmp_path / "draft.gguf", context_length=64, n_layers=1, chat_template="{{ messages[0].content }}")
    report = weigh_pair(target, draft, backend="reference", memory=1 << 30)
    found = {finding.what.split(":")[0][:24]: finding.level for finding in report.findings}
    assert report.verdict == "doubtful"
    assert found["token tables are equal"] == "ok"
    assert [f.level for f in report.findings if "chat templates differ in conversation 1" in f.what] == ["warning"]
    assert [f.level for f in report.findings if "context (64) is shorter" in f.what] == ["warning"]
    assert report.speed_ratio == pytest.approx((report.draft_tok_s or 0) / (report.target_tok_s or 1))
    unfit = weigh_pair(target, tiny_gguf(tmp_path / "big.gguf", vocab_size=1200), memory=1 << 30)
    assert (unfit.verdict, unfit.speed_ratio) == ("unfit", None)
