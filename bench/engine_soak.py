"""Random load with aborts and errors for some minutes; resident memory must not grow.

    python bench/engine_soak.py MODEL.gguf [--minutes 15] [--threads 2] [--memory BYTES]

Prints the median resident memory of the last third and of the third before it, and their ratio. Time in which the
process was stopped does not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from common import random_prompts, report, resident_mb

from edgellm import LLM, SamplingParams
from edgellm.engine.thread import Stream
from edgellm.errors import EdgeLLMError

LONGEST_S = 5.0
"""A round that took longer had been stopped meanwhile."""


def main() -> None:
    """Keep up to 12 requests in the air; abort some, send some that are refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", type=int)
    args = parser.parse_args()
    rng, samples, refused = random.Random(0), [], 0
    with LLM(args.model, backend="cpu", threads=args.threads, ctx=2048, memory=args.memory) as llm:
        elapsed, last, running = 0.0, time.monotonic(), list[Stream]()
        while elapsed < args.minutes * 60:
            now = time.monotonic()
            elapsed, last = elapsed + min(now - last, LONGEST_S), now
            samples.append((elapsed, resident_mb("VmRSS")))
            try:
                [prompt] = random_prompts(1, rng.choice([0, 10, 100, 400, 3000]), rng.randrange(1000))
                params = SamplingParams(max_tokens=rng.randint(1, 60), temperature=rng.choice([0, 0.8]))
                running.append(llm.submit(prompt, params))
            except EdgeLLMError:
                refused += 1
            if len(running) > 12 or rng.random() < 0.3:
                for stream in running[: rng.randint(1, 4)]:
                    if rng.random() < 0.4:
                        stream.cancel()
                    stream.result()
                    running.remove(stream)
        for stream in running:
            stream.result()
        third = args.minutes * 20
        parts = [statistics.median(mb for at, mb in samples if third * i <= at < third * (i + 1)) for i in (1, 2)]
        course = [round(samples[len(samples) * i // 10][1]) for i in range(10)]
        requests = llm.stats()["requests"]
        report("engine_soak", model=args.model, refused=refused, requests=requests, mb=parts, course_mb=course)
        report("engine_soak_growth", ratio=parts[1] / parts[0])


if __name__ == "__main__":
    main()
