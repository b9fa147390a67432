"""Totals since the engine started, and medians over the last requests."""

from __future__ import annotations

import time
from collections import Counter, deque
from statistics import median
from typing import Any

from edgellm.engine.answer import Answer
from edgellm.engine.scheduler import Schedule

__all__ = ["Metrics"]

RECENT = 256


class Metrics:
    """Counts what steps and finished requests report. Times in seconds, rates in tokens per second."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.totals: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self.busy_s = 0.0
        self.step_s: deque[float] = deque(maxlen=RECENT)
        self._recent: dict[str, deque[float]] = {k: deque(maxlen=RECENT) for k in ("queue_s", "ttft_s", "tpot_s")}

    def stepped(self, schedule: Schedule, seconds: float) -> None:
        """One step was computed."""
        self.busy_s += seconds
        self.step_s.append(seconds)
        self.totals["steps"] += 1
        self.totals["prefill_tokens"] += schedule.num_prefill_tokens
        self.totals["decode_tokens"] += schedule.num_tokens - schedule.num_prefill_tokens

    def sliced(self, seconds: float, num_prefill_tokens: int) -> None:
        """Part of a pass over prompt tokens was computed, and so many of them are done now."""
        self.busy_s += seconds
        self.totals["prefill_tokens"] += num_prefill_tokens

    def finished(self, answer: Answer) -> None:
        """A request ended, however."""
        request, times = answer.request, answer.timings()
        self.finish_reasons[answer.finish_reason or ""] += 1
        self.totals["requests"] += 1
        self.totals["prompt_tokens"] += request.num_prompt_tokens
        self.totals["cached_tokens"] += request.num_cached_tokens
        self.totals["new_tokens"] += request.num_new_tokens
        self.totals["preemptions"] += request.num_preemptions
        self.totals["drafted_tokens"] += answer.guesses.drafted
        self.totals["accepted_tokens"] += answer.guesses.accepted
        for name, values in self._recent.items():
            if name in times:
                values.append(times[name])

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain data."""
        names = ["steps", "prefill_tokens", "decode_tokens", "requests", "prompt_tokens", "cached_tokens"]
        names += ["new_tokens", "preemptions", "drafted_tokens", "accepted_tokens"]
        return {
            **{name: self.totals[name] for name in names},
            "finish_reasons": dict(self.finish_reasons),
            "uptime_s": time.perf_counter() - self.started,
            "busy_s": self.busy_s,
            "tokens_per_s": self.totals["new_tokens"] / self.busy_s if self.busy_s else 0.0,
            "recent": {name: median(values) for name, values in self._recent.items() if values},
        }
