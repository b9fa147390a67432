"""One speculative run of llama.cpp: for `bench/speculation.py --peer`, run by a Python that has xllamacpp.

    python bench/speculation_peer.py '{"target": ..., "draft": ..., "ids": [...], "gen": 128, "threads": 2}'

`draft`: a model's path, or "lookup" (its n-gram drafts from the context). Prints {"tok_s": new tokens per second from
submit to last token, "runs": [...]}: of its default of 3 guesses and of 7, two runs each, the best.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import xllamacpp as x


def open_server(order: dict[str, Any], most: int) -> Any:
    """A server for one sequence with the draft."""
    p = x.CommonParams()
    p.model.path, p.n_parallel, p.warmup = order["target"], 1, True
    p.n_ctx = len(order["ids"]) + order["gen"] + 64
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = order["threads"]
    kinds = x.common_speculative_type
    if order["draft"] == "lookup":
        p.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    else:
        p.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = p.speculative.draft
        draft.mparams.path, draft.n_max = order["draft"], most
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = order["threads"]
    return x.Server(p)


def main() -> None:
    """Run and print."""
    order = json.loads(sys.argv[1])
    runs = []
    for most in (3, 7) if order["draft"] != "lookup" else (3,):
        server = open_server(order, most)
        for _ in range(2):
            request = {"prompt": order["ids"], "n_predict": order["gen"], "temperature": 0, "ignore_eos": True}
            began = time.perf_counter()
            answer = server.handle_completions({**request, "cache_prompt": False})
            seconds = time.perf_counter() - began
            timings = (json.loads(answer) if isinstance(answer, (str, bytes)) else answer)["timings"]
            runs.append({"most": most, "tok_s": timings["predicted_n"] / seconds, **timings})
    print(json.dumps({"tok_s": max(run["tok_s"] for run in runs), "runs": runs}))


if __name__ == "__main__":
    main()
