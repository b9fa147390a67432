"""Run the golden files in llama.cpp and compare greedy ids, so that a conversion rule that is wrong in both our writer
and our reader is seen. (Its logits are not compared: it rounds activations to float16.)

Run with an environment that has xllamacpp:

    python -m tests.golden_tools.check_llamacpp FOLDER [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp

from tests.golden_tools.cases import CASES
from tests.golden_tools.rules import CONTEXT


def start(path: Path, **settings: Any) -> xllamacpp.Server:
    """A llama.cpp server with a float32 cache and no flash attention."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = CONTEXT
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.warmup = False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for name, value in settings.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


def post(server: xllamacpp.Server, route: str, body: dict[str, Any]) -> Any:
    """One request to the server's own address."""
    request = urllib.request.Request(
        f"{server.listening_address}{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def greedy(server: xllamacpp.Server, prompt: list[int], n: int) -> list[int]:
    """`n` ids after the prompt."""
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "return_tokens": True}
    tokens: list[int] = post(server, "/completion", body)["tokens"]
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    for case in CASES:
        if arguments.names and case.name not in arguments.names:
            continue
        z = np.load(arguments.folder / case.name / "golden.npz")
        if "greedy_ids" not in z:
            continue
        try:
            server = start(arguments.folder / case.name / f"{case.name}-f16.gguf")
        except RuntimeError as error:
            print(f"{case.name}: does not load: {error}")
            continue
        expected = z["greedy_ids"].tolist()
        found = greedy(server, z["greedy_prompt"].tolist(), len(expected))
        same = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
        print(f"{case.name}: {same} of {len(expected)} ids equal (should be: {case.llamacpp})", flush=True)
        del server


if __name__ == "__main__":
    main()
