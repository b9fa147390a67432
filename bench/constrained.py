"""What a JSON Schema costs: the same number of tokens with it and without, in process and over HTTP.

    python bench/constrained.py MODEL.gguf [--new 64] [--rounds 12] [--batch 1,8] [--temperature 0.8]

The schema asks for a list longer than `--new` tokens and the free runs may not end, so both make `--new` tokens. Runs
alternate; a ratio is the median over pairs of neighbours. One JSON line: per way and batch the tokens per second (best
and median) and `ratio`, constrained over free. Speeds are of decoding alone; compiling is timed apart (`compile_s`: the
first grammar of a model, then a second one).
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import report

PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        "kind": {"enum": ["cat", "dog", "bird"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PET, "minItems": 100, "maxItems": 200}
QUESTION = "Write a JSON list of pets with name, age, tags and kind."


def in_process(llm: Any, factory: Any, batch: int, new: int, temperature: float) -> Callable[[bool], float]:
    """Tokens per second of `batch` answers at once through `LLM.submit`."""
    from edgellm import SamplingParams

    prompt = llm.template.encode([{"role": "user", "content": QUESTION}])

    def run(constrained: bool) -> float:
        how = {"grammar": factory} if constrained else {"ignore_eos": True}
        streams = [
            llm.submit(prompt, SamplingParams(max_tokens=new, temperature=temperature, seed=i, **how))
            for i in range(batch)
        ]
        done = [stream.result() for stream in streams]
        if any(len(completion.ids) != new for completion in done):
            raise RuntimeError(f"not {new} tokens each: {[len(completion.ids) for completion in done]}")
        return sum((new - 1) / completion.timings["decode_s"] for completion in done)

    return run


def over_http(port: int, model: str, batch: int, new: int, temperature: float) -> Callable[[bool], float]:
    """Tokens per second of `batch` streams at once through /api/chat: from the first line to line number `new`."""

    def one(constrained: bool, seed: int, speeds: list[float]) -> None:
        options = {"num_predict": new if constrained else -2, "temperature": temperature, "seed": seed}
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "options": options}
        if constrained:
            body["format"] = SCHEMA
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/api/chat", json.dumps(body))
        reply = connection.getresponse()
        first = last = 0.0
        for number, _ in enumerate(reply):
            last = time.perf_counter()
            first = first or last
            if number + 1 == new:
                break
        connection.close()
        speeds.append((new - 1) / (last - first))

    def run(constrained: bool) -> float:
        speeds: list[float] = []
        threads = [threading.Thread(target=one, args=(constrained, seed, speeds)) for seed in range(batch)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(speeds)

    return run


def compare(run: Callable[[bool], float], rounds: int) -> dict[str, Any]:
    """Alternating runs."""
    run(False), run(True)
    pairs = []
    for number in range(rounds):
        order = (False, True) if number % 2 else (True, False)
        speeds = {constrained: run(constrained) for constrained in order}
        pairs.append((speeds[False], speeds[True]))
    free, constrained = zip(*pairs, strict=True)
    return {
        "free_tok_s": [round(max(free), 1), round(statistics.median(free), 1)],
        "constrained_tok_s": [round(max(constrained), 1), round(statistics.median(constrained), 1)],
        "ratio": round(statistics.median(c / f for f, c in pairs), 3),
    }


def main() -> None:
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()
    from server_load import running_server

    from edgellm.chat.grammar import GrammarCompiler

    results: dict[str, Any] = {}
    with running_server(args.model) as (llm, port, name):
        compiler, times = GrammarCompiler(llm.tokenizer), []
        for _ in range(2):
            started = time.perf_counter()
            factory = compiler.json_schema(SCHEMA)
            times.append(round(time.perf_counter() - started, 4))
        for batch in map(int, args.batch.split(",")):
            inside = in_process(llm, factory, batch, args.new, args.temperature)
            outside = over_http(port, name, batch, args.new, args.temperature)
            results[f"in_process x{batch}"] = compare(inside, args.rounds)
            results[f"http x{batch}"] = compare(outside, args.rounds)
    report("constrained", model=args.model.name, new=args.new, compile_s=times, **results)


if __name__ == "__main__":
    main()
