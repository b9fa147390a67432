"""Memory of a windowed model at a long context, as the system counts it, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.real import real_model

CTX = 16384

SCRIPT = """
import json, random, sys
from pathlib import Path
from edgellm import LLM, SamplingParams
from edgellm.memory import peak_bytes

PAGE = 4096

def resident(pages):
    with open("/proc/self/pagemap", "rb") as file:  # 8 bytes a page, the top bit says that it is in memory
        file.seek(pages.address // PAGE * 8)
        entries = file.read((pages.span[1] // PAGE + 1) * 8)
    return PAGE * sum(entries[i + 7] >> 7 for i in range(0, len(entries), 8))

ctx, length, new = int(sys.argv[2]), int(sys.argv[3]), 63
with LLM(sys.argv[1], backend="cpu", threads=2, ctx=ctx) as llm:
    planned, most = llm.stats()["memory_bytes"], 0
    rng = random.Random(0)
    stream = llm.submit([rng.randrange(1000, 30000) for _ in range(length)],
                        SamplingParams(max_tokens=new, temperature=0, ignore_eos=True))
    for _ in stream:
        groups = zip(llm.config.cache_groups, llm.stats()["cache_groups"])
        most = max(most, *(stats["used"] for group, stats in groups if group.window))
    kv = llm.engine.runner._kv
    print(json.dumps({
        "planned": planned, "peak": peak_bytes(), "tokens": length + new, "used": most,
        "windowed": [(resident(p), p.layout.block, p.spec.window) for p in kv if p.spec.window],
        "full": [resident(p) / p.stride for p in kv if not p.spec.window],
    }))
"""


def run(path: object, length: int) -> dict:
    command = [sys.executable, "-c", SCRIPT, str(path), str(CTX), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    return json.loads(done.stdout)


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_windows_stay_small_and_the_whole_is_what_was_planned() -> None:
    path = real_model("gemma3-270m.gguf")
    run(path, 20)  # kernels that this machine lacks are compiled now: the compiler takes memory of its own
    found = run(path, CTX - 64)
    block = 32
    assert all(blocks >= found["tokens"] // block for blocks in found["full"])
    assert len(found["windowed"]) == 15
    for resident, block_bytes, window in found["windowed"]:
        limit = -(-(window + 512) // block) + 2  # the window, one chunk, and blocks that both only touch
        assert found["used"] <= limit
        assert resident <= limit * block_bytes + 3 * 4096
    assert found["peak"] == pytest.approx(found["planned"], rel=0.05)
