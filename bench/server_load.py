"""What HTTP costs: many streams through the server against the same streams in process, and time to first token.

    python bench/server_load.py MODEL.gguf [--streams 64] [--new 48] [--prompt 32] [--rounds 2]

One JSON object: per round the tokens per second and the last first-token of both ways, in alternating order on the same
loaded model (fresh random prompts each time, so that no prefix is shared), the load process's own CPU time, and the
median time to first token of single requests. The load process counts bytes and lines only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WORDS = [
    "time",
    "river",
    "stone",
    "light",
    "bread",
    "window",
    "garden",
    "letter",
    "morning",
    "winter",
    "music",
    "table",
    "street",
    "paper",
    "silver",
    "mountain",
]


def prompts(count: int, tokens: int, seed: int) -> list[str]:
    """Texts of about `tokens` tokens without a common beginning."""
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(tokens)) for _ in range(count)]


def in_process(llm: Any, texts: list[str], new: int) -> dict[str, float]:
    """All prompts at once through `LLM.submit`."""
    from edgellm import SamplingParams

    params = SamplingParams(max_tokens=new, temperature=0)
    first: list[float] = []
    done = threading.Semaphore(0)
    n_tokens = 0

    def listener() -> Any:
        begun = False

        def on_event(event: Any) -> None:
            nonlocal n_tokens, begun
            n_tokens += len(event.ids)
            if event.ids and not begun:
                begun = True
                first.append(time.perf_counter())
            if event.finish_reason is not None:
                done.release()

        return on_event

    started = time.perf_counter()
    for text in texts:
        llm.submit(llm.tokenizer.encode(text), params, on_event=listener())
    for _ in texts:
        done.acquire()
    wall = time.perf_counter() - started
    return {"tok_s": n_tokens / wall, "last_first_s": max(first) - started, "tokens": n_tokens}


async def read_streams(port: int, model: str, texts: list[str], new: int) -> dict[str, float]:
    """All prompts at once over HTTP; runs in the load process."""
    first: list[float] = []
    counts: list[int] = []

    async def one(text: str) -> None:
        options = {"num_predict": new, "temperature": 0}
        body = json.dumps({"model": model, "prompt": text, "raw": True, "options": options}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        tail = b""
        while b'"done":true' not in tail:
            piece = await reader.read(65536)
            if not piece:
                raise RuntimeError(f"a stream ended early: {tail!r}")
            if b'"done":' in piece and not tail.endswith(b"~"):
                first.append(time.perf_counter())
            tail = tail[-2000:].rstrip(b"~") + piece if b'"done":true' in piece else piece[-64:] + b"~"
        counts.append(json.loads(tail[tail.rindex(b'{"model"') : tail.rindex(b"}") + 1])["eval_count"])
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(one(text) for text in texts))
    wall = time.perf_counter() - started
    return {"tok_s": sum(counts) / wall, "last_first_s": max(first) - started, "tokens": sum(counts)}


def over_http(port: int, model: str, texts: list[str], new: int) -> dict[str, float]:
    """Starts the load process and reads what it measured."""
    command = [sys.executable, __file__, "--load", str(port), model, str(new)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def load_process(port: int, model: str, new: int) -> None:
    """The light reader: its own CPU time is part of what it tells."""
    texts = json.load(sys.stdin)
    found = asyncio.run(read_streams(port, model, texts, new))
    print(json.dumps({**found, "load_cpu_s": time.process_time()}))


def first_tokens(llm: Any, port: int, model: str, count: int) -> dict[str, float]:
    """Median seconds to the first token of single requests, both ways in turn."""
    import http.client

    from edgellm import SamplingParams

    times: dict[str, list[float]] = {"in_process": [], "http": []}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for number in range(count):
        texts = prompts(2, 24, 1000 + number)
        started = time.perf_counter()
        stream = llm.submit(llm.tokenizer.encode(texts[0]), SamplingParams(max_tokens=2, temperature=0))
        next(iter(stream))
        times["in_process"].append(time.perf_counter() - started)
        for _ in stream:
            pass
        options = {"num_predict": 2, "temperature": 0}
        body = json.dumps({"model": model, "prompt": texts[1], "raw": True, "options": options})
        started = time.perf_counter()
        connection.request("POST", "/api/generate", body)
        reply = connection.getresponse()
        reply.readline()
        times["http"].append(time.perf_counter() - started)
        reply.read()
    return {name: statistics.median(values) for name, values in times.items()}


@contextmanager
def running_server(model: Path) -> Iterator[tuple[Any, int, str]]:
    """A server in this process with the model loaded: its `LLM`, the port, the model's name."""
    from edgellm.server.build import build_app
    from edgellm.server.run import EdgeServer, bind
    from edgellm.server.settings import ServerSettings

    settings = ServerSettings(keep_alive=3600)
    app, sock = build_app(settings, [str(model)]), bind("127.0.0.1", 0)
    server = EdgeServer(app, settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    while not server.started:
        time.sleep(0.05)
    (loaded,) = app.state.server.manager.loaded()
    try:
        yield loaded.llm, sock.getsockname()[1], loaded.record.name
    finally:
        server.should_exit = True
        thread.join()


def main() -> None:
    """Runs all of it."""
    if sys.argv[1] == "--load":
        load_process(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for name, default in (("streams", 64), ("new", 48), ("prompt", 32), ("rounds", 2), ("single", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    with running_server(args.model) as (llm, port, name):
        in_process(llm, prompts(4, args.prompt, 0), 8)
        over_http(port, name, prompts(4, args.prompt, 1), 8)
        result: dict[str, Any] = {
            "streams": args.streams,
            "ttft_s": first_tokens(llm, port, name, args.single),
            "rounds": [],
        }
        for number in range(args.rounds):
            both = {"in_process": in_process(llm, prompts(args.streams, args.prompt, 10 + number), args.new)}
            both["http"] = over_http(port, name, prompts(args.streams, args.prompt, 50 + number), args.new)
            result["rounds"].append(both)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
