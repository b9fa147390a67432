"""Speculation against plain decoding: the same engine, alternating, on prompts of four kinds.

    python bench/speculation.py TARGET.gguf --drafts lookup,SMALL.gguf [--gen 128] [--pairs 5] [--threads 2]
        [--temperature 0] [--kinds edit,prose]

TARGET is SmolLM2 padded with zero layers (bench/padded_model.py) until a plain step costs eight of its own, so SmolLM2
itself is a perfect draft at an eighth of the cost, and SmolLM2 with layers left out one that errs. Such numbers show
the machinery, not a real pair. Prompts: code to be repeated with an edit, a summary of a given text, free prose, random
tokens. `predicted` is what measured step times and acceptance promise by the controller's formula.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from common import random_prompts, report

from edgellm import LLM, SamplingParams

CODE = '''def read_table(path, separator=","):
    """Rows of a text table as lists of strings."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.rstrip("\\n")
            if not line or line.startswith("#"):
                continue
            rows.append([cell.strip() for cell in line.split(separator)])
    return rows


def column(rows, name):
    """Cells of one column, by the name in the first row."""
    index = rows[0].index(name)
    return [row[index] for row in rows[1:]]
'''
TEXT = (
    "The water of the lake rose for nine days. On the tenth the mill stood in it up to the window sills, and the "
    "miller moved his flour to the loft. His neighbours came with boats and took the sacks to the church on the "
    "hill, where they lay among the pews until the flood went down. Nobody counted them, and in spring not one was "
    "missing. "
)
MESSAGES = {
    "edit": f"Repeat this code exactly, but rename the function column to get_column:\n\n{CODE}",
    "summary": f"Summarise in three sentences:\n\n{TEXT}",
    "prose": "Write a short story about a lighthouse keeper who finds a map.",
}


def prompts(llm: LLM) -> dict[str, list[int]]:
    """Ids of each kind."""
    kinds = {k: llm.template.encode([{"role": "user", "content": text}]) for k, text in MESSAGES.items()}
    return {**kinds, "random": random_prompts(1, 128)[0]}


def speed(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[float, float, Any]:
    """New tokens per second from submit to last token, seconds to the first token, the completion."""
    done = llm.generate([prompt], params)[0]
    return len(done.ids) / done.timings["total_s"], done.timings["ttft_s"], done


def predicted(llm: LLM, report_: dict[str, Any]) -> float | None:
    """Best speed-up by the controller's formula at the acceptance that was seen."""
    times = llm.engine.speculator.controller.times if llm.engine.speculator else None
    plain = times.plain(1) if times else None
    if not (times and plain and report_["drafted"]):
        return None
    rate = min(0.999, report_["by_position"][0])
    draft = times.draft_step if llm.engine.speculator and llm.engine.speculator.model else 0.0
    depths = range(1, 8)
    return max((1 - rate ** (k + 1)) / (1 - rate) * plain / (k * draft + times.step(1, 1 + k)) for k in depths)


def main() -> None:
    """One JSON line per draft and kind of prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--drafts", required=True)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kinds", default="edit,summary,prose,random")
    args = parser.parse_args()
    params = SamplingParams(max_tokens=args.gen, temperature=args.temperature, seed=1, ignore_eos=True)
    settings: dict[str, Any] = {"backend": "cpu", "threads": args.threads, "ctx": 2048, "prefix_sharing": False}
    with LLM(args.target, **settings) as plain:
        for draft in args.drafts.split(","):
            with LLM(args.target, draft=draft, **settings) as guessing:
                for kind, prompt in prompts(plain).items():
                    if kind not in args.kinds.split(","):
                        continue
                    runs = []
                    for _ in range(args.pairs + 1):  # the first pair prepares both
                        base, first, expected = speed(plain, prompt, params)
                        fast, first_fast, done = speed(guessing, prompt, params)
                        assert done.ids == expected.ids
                        runs.append((base, fast, fast / base, first_fast / first))
                    base, fast, ratio, ttft = (statistics.median(column) for column in zip(*runs[1:], strict=True))
                    guesses = done.timings["speculation"]
                    report(
                        "speculation",
                        target=args.target,
                        draft=draft,
                        prompt=kind,
                        plain_tok_s=base,
                        tok_s=fast,
                        ratio=ratio,
                        ttft_ratio=ttft,
                        acceptance=guesses["accepted"] / guesses["drafted"] if guesses["drafted"] else None,
                        predicted=predicted(guessing, guesses),
                        by_position=guesses["by_position"],
                        probe_share=guessing.stats()["speculation"]["probe_share"],
                    )


if __name__ == "__main__":
    main()
