"""Make tests/data/real/b35.json: llama.cpp's logprobs deep in a text, where a wrong rotary pairing shows.

    python -m tests.golden_tools.make_b35 IDS.json OUT.json MODEL.gguf ...

IDS.json: {file name: token ids of a text}. Runs where xllamacpp is installed; float32 cache, one thread.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.golden_tools.check_llamacpp import greedy, post, start

POSITIONS = (1, 64, 256)
TOP = 40
N_GREEDY = 112


def main() -> None:
    texts: dict[str, list[int]] = json.loads(Path(sys.argv[1]).read_text())
    out: dict[str, Any] = {}
    for path in map(Path, sys.argv[3:]):
        ids = texts[path.name]
        server = start(path, n_ctx=512)
        top = {}
        for position in POSITIONS:
            body = {"prompt": ids[: position + 1], "n_predict": 1, "temperature": 0, "n_probs": TOP}
            probs = post(server, "/completion", body)["completion_probabilities"][0]["top_logprobs"]
            top[position] = [[p["id"], round(p["logprob"], 4)] for p in probs]
        out[path.name] = {"ids": ids, "top": top, "greedy": greedy(server, ids[:32], N_GREEDY)}
        del server
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
