"""What prefix sharing saves: a chat's second turn, and a prompt after a restart with --prompt-cache.

    python bench/engine_cache.py MODEL.gguf [--turn 2000] [--restart 4000] [--threads 2]

Times to first token, and their share of a cold run's.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import random_prompts, report

from edgellm import LLM, SamplingParams

SHORT = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)


def second_turn(model: str, length: int, threads: int) -> dict[str, Any]:
    """A conversation of `length` tokens, then its second turn of 20 more; and the same prompt cold."""
    [first], [question] = random_prompts(1, length, 1), random_prompts(1, 20, 2)
    with LLM(model, backend="cpu", threads=threads) as llm:
        llm.generate([random_prompts(1, 600, 3)[0]], SHORT)  # kernels and recorded steps
        answer = llm.generate([first], SHORT)[0]
        turn = [*first, *answer.ids, *question]
        warm = llm.generate([turn], SHORT)[0]
        cold = llm.generate([[turn[0] + 1, *turn[1:]]], SHORT)[0]  # another first token: nothing can be shared
    return {
        "prompt": len(turn),
        "cached_tokens": warm.cached_tokens,
        "ttft_s": warm.timings["ttft_s"],
        "cold_ttft_s": cold.timings["ttft_s"],
        "share": warm.timings["ttft_s"] / cold.timings["ttft_s"],
    }


def restart(model: str, length: int, threads: int, folder: Path) -> dict[str, Any]:
    """A prompt in one LLM that is closed, then the same in a new one that loads the file."""
    [prompt] = random_prompts(1, length, 4)
    found = []
    for _ in range(2):
        with LLM(model, backend="cpu", threads=threads, prompt_cache=folder / "cache") as llm:
            found.append(llm.generate([prompt], SHORT)[0])
    assert found[0].ids == found[1].ids
    times = [c.timings["ttft_s"] for c in found]
    return {"cached_tokens": found[1].cached_tokens, "ttft_s": times[1], "cold_ttft_s": times[0]} | {
        "share": times[1] / times[0],
        "file_mb": (folder / "cache").stat().st_size / 1e6,
    }


def main() -> None:
    """Both, one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--turn", type=int, default=2000)
    parser.add_argument("--restart", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    report("engine_second_turn", model=args.model, **second_turn(args.model, args.turn, args.threads))
    with tempfile.TemporaryDirectory() as folder:
        report("engine_restart", model=args.model, **restart(args.model, args.restart, args.threads, Path(folder)))


if __name__ == "__main__":
    main()
