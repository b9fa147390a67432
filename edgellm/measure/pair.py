"""A target and a draft weighed against each other: what they agree on, their speeds, and what both take."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from edgellm.config import SamplingParams
from edgellm.llm import LLM, memory_budget
from edgellm.memory import kv_bytes, make_plan, runtime_bytes
from edgellm.opening import ModelFile
from edgellm.pairing import Finding, compare_files

__all__ = ["PairReport", "decode_speed", "weigh_pair"]

RATIO = 3.0
"""A draft that is less than this many times faster seldom pays."""

GEN = 24


@dataclass(frozen=True)
class PairReport:
    """`verdict`: "good", "doubtful" (it works, but something speaks against it) or "unfit" (it cannot help)."""

    verdict: str
    findings: tuple[Finding, ...]
    target_tok_s: float | None
    draft_tok_s: float | None
    speed_ratio: float | None
    total_bytes: int
    budget_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "findings": [asdict(finding) for finding in self.findings]}


def weigh_pair(target: str | os.PathLike[str], draft: str | os.PathLike[str], **settings: Any) -> PairReport:
    """Compare two models' files; where they fit, measure both. `settings`: as for `LLM` (backend, threads, memory).

    Findings call the models what the caller does. Raises what opening either model raises."""
    first, second = ModelFile.open(target), ModelFile.open(draft)
    try:
        findings = compare_files(first, second)
        kv_type, ctx = settings.get("kv_type", "f16"), settings.get("ctx")
        length = min(ctx or first.config.context_length, second.config.context_length)
        draft_bytes = second.gguf.nbytes + kv_bytes(second.config, length, kv_type)
        budget = settings.get("memory") or memory_budget(settings.get("backend", "auto"))
        plan = make_plan(first.config, first.gguf.nbytes, kv_type, ctx, budget, draft_bytes, runtime_bytes())
    finally:
        first.gguf.close()
        second.gguf.close()
    if not plan.fits:
        numbers = f"both need {plan.total_bytes} bytes, the memory budget is {plan.budget_bytes}"
        findings.append(Finding("error", numbers))
    speeds: tuple[float, float] | None = None
    if not any(finding.level == "error" for finding in findings):
        speeds = decode_speed(target, **settings), decode_speed(draft, **settings)
        findings.append(_speed_finding(*speeds))
    levels = {finding.level for finding in findings}
    return PairReport(
        verdict="unfit" if "error" in levels else "doubtful" if "warning" in levels else "good",
        findings=tuple(findings),
        target_tok_s=speeds[0] if speeds else None,
        draft_tok_s=speeds[1] if speeds else None,
        speed_ratio=speeds[1] / speeds[0] if speeds else None,
        total_bytes=plan.total_bytes,
        budget_bytes=plan.budget_bytes,
    )


def decode_speed(path: str | os.PathLike[str], **settings: Any) -> float:
    """Tokens/s of plain decoding, the median step."""
    with LLM(path, **{**settings, "ctx": 256}) as llm:
        prompt = [i % llm.config.vocab_size for i in range(10, 42)]
        for _ in range(2):  # the first run may prepare kernels
            llm.generate([prompt], SamplingParams(max_tokens=GEN, temperature=0, ignore_eos=True))
            llm.settle()
        return 1 / median(list(llm.engine.metrics.step_s)[-GEN + 4 :])


def _speed_finding(target: float, draft: float) -> Finding:
    numbers = f"the draft is {draft / target:.1f} times as fast ({draft:.1f} against {target:.1f} tok/s)"
    if draft < RATIO * target:
        return Finding("warning", f"{numbers}; it should be {RATIO:.0f} times or more to pay")
    return Finding("ok", numbers)
