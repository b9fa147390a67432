"""Speed of a model: prompt processing, decoding at a depth with several sequences, and several rows in one pass.

Each figure is the median of `runs` runs after one that does not count and `LLM.settle`. Token ids are random, all
sequences different, so that no prefix is shared. Decoding is the engine's own step: batch, model, output head, argmax
per sequence.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.config import SamplingParams
from edgellm.errors import MemoryBudgetError, RequestError
from edgellm.measure.traffic import kv_read_bytes, weight_read_bytes
from edgellm.quants import QTensor

if TYPE_CHECKING:
    from edgellm.engine.request import Request
    from edgellm.llm import LLM

LEAST_CHUNK = 8
"""Prompt tokens that the engine computes in a step at least, while others decode."""

__all__ = ["BenchPlan", "BenchResult", "longest_sequence", "run_bench"]


@dataclass(frozen=True)
class BenchPlan:
    """What to measure; 0 in `prompt`, `gen` or `rows` switches that kind off."""

    prompt: int = 512
    gen: int = 128
    depths: tuple[int, ...] = (0,)
    batches: tuple[int, ...] = (1,)
    rows: tuple[int, ...] = (0,)
    runs: int = 5

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise RequestError(f"--runs must be 1 or more, not {self.runs}")
        for name in ("depths", "batches", "rows"):
            values = getattr(self, name)
            if not values or min(values) < (1 if name == "batches" else 0):
                raise RequestError(f"--{name.rstrip('s')} holds a value that is too small: {list(values)}")


@dataclass(frozen=True)
class BenchResult:
    """One line of the table. `tok_s`: tokens/s over the whole batch, the median of `runs`. `gb_s`: weight and cache
    bytes read per second; `roofline`: its share of the measured bandwidth (decoding only)."""

    test: str
    n_prompt: int
    n_gen: int
    depth: int
    batch: int
    tok_s: float
    runs: list[float] = field(default_factory=list)
    gb_s: float = 0.0
    roofline: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields by name, rounded to what was measured."""
        values = asdict(self)
        values["tok_s"], values["gb_s"] = round(self.tok_s, 3), round(self.gb_s, 3)
        values["runs"] = [round(x, 3) for x in self.runs]
        values["roofline"] = None if self.roofline is None else round(self.roofline, 4)
        return values


def longest_sequence(plan: BenchPlan) -> int:
    """Tokens one sequence needs room for, so that the model can be opened with that context. Sequences that are ready
    early decode on while the others' prompts are computed, at most one token for each of their chunks."""
    waiting = (max(plan.batches) - 1) * (max(plan.depths) // LEAST_CHUNK + 1)
    decode = max(plan.depths) + plan.gen + waiting + 2 if plan.gen else 0
    return max(plan.prompt + 2, decode, max(plan.rows) + 1, 2)


class _Rig:
    """One loaded model, its engine driven by hand."""

    def __init__(self, llm: LLM, tensors: Mapping[str, QTensor], plan: BenchPlan, bandwidth_gb_s: float):
        self.llm, self.tensors, self.plan = llm, tensors, plan
        self.bandwidth_gb_s = bandwidth_gb_s
        self.kv_type = llm.engine.config.kv_type
        self._rng = np.random.default_rng(0)

    def ids(self, n: int) -> list[int]:
        """`n` random ids."""
        return [int(i) for i in self._rng.integers(0, self.llm.config.vocab_size, n)]

    def prompt_time(self, n: int) -> float:
        """Seconds from submitting a prompt of `n` tokens to its first new token."""
        engine = self.llm.engine
        ids = self.ids(n)
        started = time.perf_counter()
        engine.add_request(ids, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        while engine.has_work:
            engine.step()
        return time.perf_counter() - started

    def decode_time(self, prompts: list[list[int]], n_gen: int) -> float:
        """Seconds in which every sequence gets `n_gen` tokens, once all have had their prompts."""
        engine = self.llm.engine
        # Sequences whose prompts are done first go on while the others' are computed.
        params = SamplingParams(temperature=0, max_tokens=-1, ignore_eos=True)
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(engine.add_request(prompt, params))
            while any(request.num_tokens == request.num_prompt_tokens for request in requests):
                engine.step()
            before = [request.num_tokens for request in requests]
            started = time.perf_counter()
            for _ in range(n_gen):
                engine.step()
            seconds = time.perf_counter() - started
            made = [request.num_tokens - n for request, n in zip(requests, before, strict=True)]
        finally:
            # The engine's thread knows nothing of these requests: none may be left to it.
            for request in requests:
                engine.abort(request.request_id)
            while engine.has_work:
                engine.step()
        if made != [n_gen] * len(prompts):
            raise MemoryBudgetError(f"not every sequence decoded at every step ({made}); give more --memory")
        return seconds

    def rows_time(self, n: int) -> float:
        """Seconds of one pass over `n` tokens of one sequence, logits for all of them."""
        ids = self.ids(n)
        started = time.perf_counter()
        self.llm.logits(ids)
        return time.perf_counter() - started

    def result(self, name: str, seconds: list[float], n_tokens: int, n_bytes: float, **shape: int) -> BenchResult:
        """The line for `seconds` per run, in which `n_tokens` tokens were computed and `n_bytes` read."""
        runs = [n_tokens / s for s in seconds]
        gb_s = n_bytes / statistics.median(seconds) / 1e9
        roofline = gb_s / self.bandwidth_gb_s if name.startswith("tg") else None
        return BenchResult(name, **shape, tok_s=statistics.median(runs), runs=runs, gb_s=gb_s, roofline=roofline)


def run_bench(
    llm: LLM,
    tensors: Mapping[str, QTensor],
    plan: BenchPlan,
    bandwidth_gb_s: float,
    progress: Callable[[str], None] | None = None,
) -> Iterator[BenchResult]:
    """Measure what `plan` asks for, one result at a time. `tensors`: the file's, for the bytes they take."""
    rig = _Rig(llm, tensors, plan, bandwidth_gb_s)
    say = progress or (lambda text: None)
    if plan.prompt:
        say(f"pp{plan.prompt}")
        yield _prompt(rig, plan.prompt)
    if plan.gen:
        for depth in plan.depths:
            for batch in plan.batches:
                say(f"tg{plan.gen} at depth {depth}, batch {batch}")
                yield _decode(rig, depth, batch)
    for n in plan.rows:
        if n:
            say(f"rows{n}")
            yield _rows(rig, n)


def _repeat(rig: _Rig, measure: Callable[[], float]) -> list[float]:
    measure()
    rig.llm.settle()
    return [measure() for _ in range(rig.plan.runs)]


def _prompt(rig: _Rig, n: int) -> BenchResult:
    seconds = _repeat(rig, lambda: rig.llm.on_engine(lambda: rig.prompt_time(n)))
    chunk = rig.llm.engine.config.max_batch_tokens
    chunks = [min(chunk, n - start) for start in range(0, n, chunk)]
    n_bytes = sum(weight_read_bytes(rig.tensors, rig.llm.config, size, 0) for size in chunks)
    n_bytes += kv_read_bytes(rig.llm.config, rig.kv_type, n)
    return rig.result(f"pp{n}", seconds, n, n_bytes, n_prompt=n, n_gen=0, depth=0, batch=1)


def _decode(rig: _Rig, depth: int, batch: int) -> BenchResult:
    n = rig.plan.gen
    prompts = [rig.ids(max(1, depth)) for _ in range(batch)]
    seconds = _repeat(rig, lambda: rig.llm.on_engine(lambda: rig.decode_time(prompts, n)))
    weights = weight_read_bytes(rig.tensors, rig.llm.config, batch, batch)
    cache = batch * kv_read_bytes(rig.llm.config, rig.kv_type, max(1, depth) + n / 2)
    return rig.result(
        f"tg{n}", seconds, n * batch, n * (weights + cache), n_prompt=0, n_gen=n, depth=depth, batch=batch
    )


def _rows(rig: _Rig, n: int) -> BenchResult:
    seconds = _repeat(rig, lambda: rig.rows_time(n))
    n_bytes = weight_read_bytes(rig.tensors, rig.llm.config, n, n)
    return rig.result(f"rows{n}", seconds, n, n_bytes, n_prompt=n, n_gen=0, depth=0, batch=1)
