"""Memory at a long context: windowed layers' blocks, and resident memory against the plan (Linux).

python bench/engine_memory.py MODEL.gguf [--ctx 16384] [--threads 2]
"""

from __future__ import annotations

import argparse

from common import random_prompts, report, resident_mb

from edgellm import LLM, SamplingParams


def main() -> None:
    """Fill the context and read what grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ctx", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with LLM(args.model, backend="cpu", threads=args.threads, ctx=args.ctx) as llm:
        most = {}

        def look(event: object) -> None:
            for i, group in enumerate(llm.engine.stats()["cache_groups"]):
                most[i] = max(most.get(i, 0), group["used"])

        start = resident_mb()
        [prompt] = random_prompts(1, args.ctx - 64)
        stream = llm.submit(prompt, SamplingParams(max_tokens=63, temperature=0, ignore_eos=True))
        for event in stream:
            look(event)
        stats = llm.stats()
        report(
            "engine_memory",
            model=args.model,
            ctx=args.ctx,
            blocks_in_use=most,
            windows=[group.window for group in llm.config.cache_groups],
            anonymous_before_mb=start,
            anonymous_after_mb=resident_mb(),
            resident_mb=resident_mb("VmRSS"),
            planned_mb=stats["memory"]["total_bytes"] / 2**20,
            plan=stats["memory"],
        )


if __name__ == "__main__":
    main()
