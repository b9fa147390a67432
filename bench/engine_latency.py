"""Token gaps of running streams while a long prompt arrives.

    python bench/engine_latency.py MODEL.gguf [--streams 4] [--prompt 6000] [--threads 2]

Prints the median gap before the arrival, and the 99th percentile and worst gap from the arrival to the long prompt's
first token, over all streams. The promise: the 99th percentile is at most 4 times the median.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

from common import random_prompts, report

from edgellm import LLM, SamplingParams


def main() -> None:
    """Start the streams, let them run, send the long prompt, collect gaps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=6000)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with LLM(args.model, backend="cpu", threads=args.threads) as llm:
        times: list[list[float]] = [[] for _ in range(args.streams)]

        def listener(span: list[float]) -> Any:
            return lambda event: span.append(time.perf_counter()) if event.ids else None

        endless = SamplingParams(max_tokens=6000, temperature=0, ignore_eos=True)
        streams = [
            llm.submit(prompt, endless, on_event=listener(span))
            for prompt, span in zip(random_prompts(args.streams, 64), times, strict=True)
        ]
        while min(map(len, times)) < 100:
            time.sleep(0.01)
        arrived = time.perf_counter()
        [long] = random_prompts(1, args.prompt, seed=1)
        done = llm.submit(long, SamplingParams(max_tokens=1, temperature=0)).result()
        ended = time.perf_counter()
        for stream in streams:
            stream.cancel()
        gaps = [(b, b - a) for span in times for a, b in itertools.pairwise(span)]
        before = statistics.median(gap for at, gap in gaps if at < arrived)
        during = sorted(gap for at, gap in gaps if arrived < at <= ended)
        p99 = during[min(len(during) - 1, int(0.99 * len(during)))]
        report(
            "engine_latency",
            model=args.model,
            median_before_ms=before * 1e3,
            p99_during_ms=p99 * 1e3,
            worst_during_ms=during[-1] * 1e3,
            ratio=p99 / before,
            ttft_s=done.timings["ttft_s"],
        )


if __name__ == "__main__":
    main()
