"""Speculation against plain decoding: the same engine, alternating, on prompts of four kinds.

    python bench/speculation.py TARGET.gguf --drafts lookup,SMALL.gguf [--gen 128] [--pairs 6] [--threads 2]
        [--temperature 0] [--kinds edit,prose] [--batch 8 --kinds mixed] [--peer /path/to/peer/bin/python]

TARGET is SmolLM2 padded with zero layers (bench/padded_model.py) until a plain step costs eight of its own, so SmolLM2
itself is a perfect draft at an eighth of the cost, and SmolLM2 with layers left out one that errs. Such numbers show
the machinery, not a real pair. Prompts: code to be repeated with an edit, a summary of a given text, free prose, random
tokens; "mixed" are all of them. A draft "lookup+SMALL.gguf" is both.

`ratio` is the median of the pairs' ratios of new tokens per second from submit to last token, with its 95% interval (of
order statistics), `ttft` that of times to the first token. `predicted` is what measured step times and acceptance
promise by the controller's formula, time to first token and catching up on the prompt included. `peer`: our speed over
that of llama.cpp (xllamacpp, in an environment of its own) with the same draft on the same ids, the better of 3 (its
default) and 7 guesses at most.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from common import random_prompts, report

from edgellm import LLM, SamplingParams
from edgellm.engine.depth import Prospect

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


COLUMNS = (
    "draft",
    "prompt",
    "plain",
    "tok_s",
    "ratio",
    "low",
    "high",
    "predicted",
    "accepted",
    "ttft",
    "t_low",
    "t_high",
    "probes",
    "peer",
)


BEGUN = "```python\ndef read_table("
"""How the answer to "edit" begins: left alone, SmolLM2 does something else than was asked."""


def prompts(llm: LLM, kind: str, batch: int) -> list[list[int]]:
    """Ids of a batch of that kind."""
    kinds = {k: llm.template.encode([{"role": "user", "content": text}]) for k, text in MESSAGES.items()}
    kinds["edit"] += llm.tokenize(BEGUN, bos=False)
    kinds["random"] = random_prompts(1, 128)[0]
    chosen = list(kinds.values()) if kind == "mixed" else [kinds[kind]]
    return [chosen[i % len(chosen)] for i in range(batch)]


def run(llm: LLM, asked: list[list[int]], params: SamplingParams) -> tuple[float, float, list[Any]]:
    """Seconds from submit to last token, median seconds to the first, the completions."""
    began = time.perf_counter()
    done = llm.generate(asked, params)
    return time.perf_counter() - began, statistics.median(d.timings["ttft_s"] for d in done), done


def interval(values: list[float]) -> tuple[float, float]:
    """95% interval of the median by order statistics (all values where there are fewer than six)."""
    n, outside, k = len(values), 0.0, 0
    while k < n // 2 and outside + math.comb(n, k) / 2**n <= 0.025:
        outside += math.comb(n, k) / 2**n
        k += 1
    ordered = sorted(values)
    return ordered[max(0, k - 1)], ordered[n - max(1, k)]


def matched(runs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Runs of the second of two models that take turns as A B, B A, A B ..., exchanged by twos, so that each stands
    where a run of the first does that was begun in the same state: a model that has just run itself is 5% sooner with
    its first token than one that slept while the other ran."""
    return [runs[i ^ 1] for i in range(len(runs))]


def predicted(llm: LLM, asked: list[list[int]], done: list[Any], plain: tuple[float, float]) -> float | None:
    """Speed-up of one request by measured step times and acceptance: tokens of verified runs at the best depth, the
    others (nothing to look up, catching up) as plain steps. `plain`: its seconds to the last and to the first token."""
    speculator, guesses = llm.engine.speculator, done[0].timings["speculation"]
    if speculator is None or len(asked) > 1 or not guesses["drafted"]:
        return None
    controller, (total, first) = speculator.controller, plain
    context, runs, accepted = len(asked[0]) + len(done[0].ids) // 2, guesses["verifications"], guesses["accepted"]
    rate = accepted / (accepted + guesses["rejected"])
    per_token = controller.promise(Prospect(rate, controller.most, speculator.model is not None), 1, context)
    step = controller.times.plain(1, context) or 0.0
    catch_up = controller.catch_up_s.typical * len(asked[0]) if speculator.model else 0.0
    guessed = accepted + runs
    plain_tokens = len(done[0].ids) - 1 - guessed
    return total / (first + catch_up + min(per_token, step) * guessed + step * plain_tokens)


def peer_speed(args: argparse.Namespace, draft: str, asked: list[int]) -> float:
    """llama.cpp's new tokens per second from submit to last token."""
    script = Path(__file__).with_name("speculation_peer.py")
    order = {"target": args.target, "draft": draft, "ids": asked, "gen": args.gen, "threads": args.threads}
    command = [args.peer, str(script), json.dumps(order)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
    return float(json.loads(found)["tok_s"])


def compare(args: argparse.Namespace, plain: LLM, guessing: LLM, draft: str, kind: str) -> dict[str, Any]:
    """All pairs of one draft and kind of prompt."""
    params = SamplingParams(max_tokens=args.gen, temperature=args.temperature, seed=1, ignore_eos=True)
    asked = prompts(plain, kind, args.batch)
    runs: dict[LLM, list[tuple[float, float]]] = {plain: [], guessing: []}
    for i in range(args.pairs + 1):  # the first pair prepares both
        order = (plain, guessing) if i % 2 else (guessing, plain)
        found = {llm: run(llm, asked, params) for llm in order}
        assert [d.ids for d in found[plain][2]] == [d.ids for d in found[guessing][2]]
        for llm in order:
            runs[llm].append(found[llm][:2])
    done = found[guessing][2]
    slow, first = (list(column) for column in zip(*runs[plain][1:], strict=True))
    fast, first_fast = (list(column) for column in zip(*matched(runs[guessing][1:]), strict=True))
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    later = [b / a for a, b in zip(first, first_fast, strict=True)]
    new, (low, high), (t_low, t_high) = args.gen * args.batch, interval(ratios), interval(later)
    drafted = sum(d.timings["speculation"]["drafted"] for d in done)
    speed = new / statistics.median(fast)
    return {
        "draft": draft,
        "prompt": kind,
        "plain": new / statistics.median(slow),
        "tok_s": speed,
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "predicted": predicted(guessing, asked, done, (statistics.median(slow), statistics.median(first))),
        "accepted": sum(d.timings["speculation"]["accepted"] for d in done) / drafted if drafted else None,
        "ttft": statistics.median(later),
        "t_low": t_low,
        "t_high": t_high,
        "probes": guessing.stats()["speculation"]["probe_share"],
        "peer": speed / peer_speed(args, draft, asked[0]) if args.peer else None,
        "by_position": done[0].timings["speculation"]["by_position"],
        "own_account": done[0].timings["speculation"]["speedup"],
    }


def main() -> None:
    """One JSON line per draft and kind of prompt, then a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--drafts", required=True)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=6, help="An even number.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kinds", default="edit,summary,prose,random")
    parser.add_argument("--peer", help="Python that has xllamacpp.")
    args = parser.parse_args()
    if args.pairs % 2:
        parser.error("--pairs must be even: each order as often as the other")
    settings: dict[str, Any] = {"backend": "cpu", "threads": args.threads, "ctx": 2048, "prefix_sharing": False}
    rows = []
    with LLM(args.target, **settings) as plain:
        for draft in args.drafts.split(","):
            with LLM(args.target, draft=draft.replace("+", ","), **settings) as guessing:
                for kind in args.kinds.split(","):
                    rows.append(compare(args, plain, guessing, draft, kind))
                    report("speculation", target=args.target, gen=args.gen, batch=args.batch, **rows[-1])
    shown = [[Path(row["draft"]).stem, *(row[name] for name in COLUMNS[1:])] for row in rows]
    for row in [COLUMNS, *shown]:
        print(*(f"{v:<12}" if isinstance(v, str) else f"{'-' if v is None else format(v, '.3f'):<12}" for v in row))


if __name__ == "__main__":
    main()
