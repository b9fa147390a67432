"""edgellm against llama.cpp on the same file, alternating, as ratios.

    python bench/vs_llamacpp.py MODEL.gguf --peer /path/to/peer/bin/python [--prompt 512] [--gen 128] [--depth 0,2048]
        [--rows 1,2,4,8] [--threads 2] [--rounds 3]

The peer interpreter has `pip install xllamacpp` (llama.cpp, prebuilt) in an environment of its own. Every round starts
both engines once, one after the other; llama.cpp runs with and without flash attention and the better median counts.
Prints one JSON line with machine, commit and all runs, then a table of medians and ratios.

llama.cpp's server reports prompt and decode times itself. At a depth D its decode time is that of N tokens after a
prompt of D. `rowsK` is decoding with K sequences in one batch: its server has no call for K rows of one sequence.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

PEER = r"""
import json, random, sys, threading
import xllamacpp as x
model, threads, flash, n_prompt, n_gen, depth, parallel = sys.argv[1], *map(int, sys.argv[2:])
p = x.CommonParams()
p.model.path, p.n_parallel, p.warmup = model, parallel, True
p.n_ctx = parallel * (max(n_prompt, depth) + n_gen + 64)
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
kinds = x.llama_flash_attn_type
p.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
server, rng = x.Server(p), random.Random(0)

def ask(n, new):
    ids = [rng.randrange(1000, 30000) for _ in range(n)]
    request = {"prompt": ids, "n_predict": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    answer = server.handle_completions(request)
    return (json.loads(answer) if isinstance(answer, (str, bytes)) else answer)["timings"]

out = {}
if n_prompt:
    out["pp"] = [ask(n_prompt, 1)["prompt_per_second"] for _ in range(3)]
if n_gen and parallel == 1:
    out["tg"] = [ask(max(1, depth), n_gen)["predicted_per_second"] for _ in range(2)]
elif n_gen:
    def one(i):
        speeds[i] = ask(max(1, depth), n_gen)["predicted_per_second"]
    speeds = [0.0] * parallel
    workers = [threading.Thread(target=one, args=(i,)) for i in range(parallel)]
    [w.start() for w in workers], [w.join() for w in workers]
    out["tg"] = [sum(speeds)]
print(json.dumps(out))
"""


def run_peer(args: argparse.Namespace, flash: bool, prompt: int, gen: int, depth: int, parallel: int) -> dict[str, Any]:
    """llama.cpp's tokens/s, in a process of its own."""
    numbers = map(str, (args.threads, int(flash), prompt, gen, depth, parallel))
    command = [args.peer, "-c", PEER, args.model, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def run_ours(args: argparse.Namespace, prompt: int, gen: int, depth: int, rows: int) -> list[dict[str, Any]]:
    """`edgellm bench`'s results, in a process of its own."""
    numbers = {"prompt": prompt, "gen": gen, "depth": depth, "rows": rows, "threads": args.threads, "runs": 3}
    flags = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "edgellm", "bench", args.model, "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return results


def cases(args: argparse.Namespace) -> list[tuple[str, tuple[int, int, int, int]]]:
    """Name, and (prompt, gen, depth, rows) of each comparison."""
    found = []
    if args.prompt:
        found.append((f"pp{args.prompt}", (args.prompt, 0, 0, 0)))
    if args.gen:
        found += [(f"tg{args.gen}@{depth}", (0, args.gen, depth, 0)) for depth in args.depth]
    return found + [(f"rows{rows}", (0, 0, 0, rows)) for rows in args.rows if rows]


def compare(args: argparse.Namespace, prompt: int, gen: int, depth: int, rows: int) -> dict[str, list[float]]:
    """All runs of one case by engine: `edgellm`, `llama.cpp`, `llama.cpp+fa`; tokens/s."""
    runs: dict[str, list[float]] = {"edgellm": [], "llama.cpp": [], "llama.cpp+fa": []}
    for _ in range(args.rounds):
        runs["edgellm"] += run_ours(args, prompt, gen, depth, rows)[0]["runs"]
        for flash in (False, True):
            peer = run_peer(args, flash, prompt, gen or (32 if rows else 0), depth, rows or 1)
            runs["llama.cpp+fa" if flash else "llama.cpp"] += peer["pp" if prompt else "tg"]
    return runs


def main() -> None:
    """Run every case and print the JSON line and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--peer", required=True, help="Python that has xllamacpp.")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--depth", type=lambda s: [int(x) for x in s.split(",")], default=[0])
    parser.add_argument("--rows", type=lambda s: [int(x) for x in s.split(",")], default=[])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines, record = [], {}
    for name, case in cases(args):
        runs = compare(args, *case)
        ours = statistics.median(runs["edgellm"])
        peer = max(statistics.median(runs[key]) for key in ("llama.cpp", "llama.cpp+fa"))
        record[name] = runs
        lines.append(f"{name:<14} {ours:>10.1f} {peer:>10.1f} {ours / peer:>7.2f}")
        print(lines[-1], file=sys.stderr, flush=True)
    machine = f"{platform.processor() or platform.machine()} {platform.system()}"
    about = {"model": Path(args.model).name, "commit": commit, "machine": machine, "threads": args.threads}
    print(json.dumps({**about, "runs": record}))
    print(f"{'test':<14} {'edgellm':>10} {'llama.cpp':>10} {'ratio':>7}", *lines, sep="\n")


if __name__ == "__main__":
    main()
