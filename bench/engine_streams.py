"""Several streams at once: tokens/s while all decode, and over the whole time, beside llama.cpp in the same minutes.

    python bench/engine_streams.py MODEL.gguf [--streams 8,32,64] [--prompt 128] [--gen 64] [--threads 2] [--runs 3]
        [--peer /path/to/peer/bin/python]

Prompts share no block and the prefix cache is off. `decoding`: new tokens per second between the moment the last
stream has its first token and the moment the first one ends (0 where that is earlier). `total`: all new tokens from
first submit to last token. The peer interpreter has `pip install xllamacpp`; its runs alternate with ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from common import random_prompts, report

from edgellm import LLM, SamplingParams

PEER = r"""
import json, sys, threading, time
import xllamacpp as x
sys.path.insert(0, sys.argv[6])
from common import random_prompts
model, streams, length, gen, threads = sys.argv[1], *map(int, sys.argv[2:6])
p = x.CommonParams()
p.model.path, p.n_parallel, p.warmup, p.n_ctx = model, streams, True, streams * (length + gen + 64)
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
server = x.Server(p)

def one(i, prompt, spans):
    times = []
    request = {"prompt": prompt, "n_predict": gen, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
               "stream": True}
    def heard(chunk):
        times.append(time.perf_counter())
    server.handle_completions(request, heard)
    spans[i] = times

def run(seed):
    spans = [None] * streams
    prompts = random_prompts(streams, length, seed)
    began = time.perf_counter()
    workers = [threading.Thread(target=one, args=(i, q, spans)) for i, q in enumerate(prompts)]
    [w.start() for w in workers], [w.join() for w in workers]
    return {"began": began, "spans": spans}
run(99)
print(json.dumps(run(int(sys.argv[7]))))
"""


def rates(began: float, spans: list[list[float]], gen: int) -> dict[str, float]:
    """Tokens/s while all streams decode, and in total."""
    last_first, first_last = max(s[0] for s in spans), min(s[-1] for s in spans)
    inside = sum(last_first < t <= first_last for s in spans for t in s)
    return {
        "decoding": inside / max(first_last - last_first, 1e-9),
        "total": len(spans) * gen / (max(s[-1] for s in spans) - began),
    }


def run_ours(llm: LLM, streams: int, length: int, gen: int, seed: int) -> dict[str, float]:
    """One run on an open model."""
    spans: list[list[float]] = [[] for _ in range(streams)]
    ended = threading.Semaphore(0)

    def listener(span: list[float]) -> Any:
        def heard(event: Any) -> None:
            if event.ids:
                span.append(time.perf_counter())
            if event.finish_reason is not None:
                ended.release()

        return heard

    params = SamplingParams(max_tokens=gen, temperature=0, ignore_eos=True)
    prompts = random_prompts(streams, length, seed)
    began = time.perf_counter()
    for prompt, span in zip(prompts, spans, strict=True):
        llm.submit(prompt, params, on_event=listener(span))
    for _ in spans:
        ended.acquire()
    return rates(began, spans, gen)


def run_peer(args: argparse.Namespace, streams: int, seed: int) -> dict[str, float]:
    """One run of llama.cpp in a process of its own (after a warm-up run)."""
    numbers = map(str, (streams, args.prompt, args.gen, args.threads))
    command = [args.peer, "-c", PEER, args.model, *numbers, sys.path[0], str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    return rates(answer["began"], answer["spans"], args.gen)


def main() -> None:
    """Alternate ours and the peer's runs; one JSON line per number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", default="8,32,64")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer")
    args = parser.parse_args()
    with LLM(args.model, backend="cpu", threads=args.threads, prefix_sharing=False) as llm:
        for streams in map(int, args.streams.split(",")):
            run_ours(llm, streams, args.prompt, args.gen, 99)
            ours, peer = [], []
            for seed in range(args.runs):
                ours.append(run_ours(llm, streams, args.prompt, args.gen, seed))
                if args.peer:
                    peer.append(run_peer(args, streams, seed))
            medians = {
                who: {key: statistics.median(r[key] for r in runs) for key in ("decoding", "total")}
                for who, runs in (("ours", ours), ("llama.cpp", peer))
                if runs
            }
            report("engine_streams", model=args.model, streams=streams, medians=medians, ours=ours, peer=peer)


if __name__ == "__main__":
    main()
