"""Two hundred clients that break off, read slowly or send rubbish, while others are served: their answers do not change
by a byte, nothing is leaked, and the server stays up. Over a script, and over the demo model's weights."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import Live, live_scripted
from tests.server.model_store import live_store, own_home, store_model
from tests.server.test_departures import eventually, idle, load, request_bytes
from tests.support.real import real_model
from tests.support.scripted import hash_script

SEED = 20261129


def good_body(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {number} " * (number + 1)}]
    options = {"num_predict": 16, "temperature": 1.0, "seed": number}
    return {"model": "fake", "messages": messages, "options": options}


def answer(server: Live, number: int) -> str:
    text = server.client.post("/api/chat", json=good_body(number), timeout=60).text
    parts = [json.loads(line) for line in text.splitlines()]
    assert parts[-1]["done"]
    return "".join(part["message"]["content"] for part in parts)


def misbehave(server: Live, rng: random.Random) -> None:
    """One bad client."""
    kind = rng.randrange(6)
    path = rng.choice(["/api/chat", "/v1/chat/completions", "/api/generate", "/v1/messages", "/api/embed"])
    body = {"stream": rng.random() < 0.7, "prompt": "x" * rng.randrange(1, 300), "max_tokens": 50}
    if rng.random() < 0.3:
        body |= {"format": {"type": "array", "items": {"type": "string"}}, "options": {"num_predict": 50}}
    whole = request_bytes(path, body)
    with server.connect() as sock:
        if kind == 0:  # leaves in the middle of its own request
            sock.sendall(whole[: rng.randrange(len(whole))])
        elif kind == 1:  # rubbish
            sock.sendall(rng.randbytes(rng.randrange(1, 400)))
        elif kind == 2:  # JSON that is none, or of the wrong shape
            body = rng.choice([b"{", b"[]", b'{"model":5}', b'{"model":"fake","messages":7}', b"\xff\xfe\x00"])
            sock.sendall(
                b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
                % (path.encode(), len(body), body)
            )
            sock.recv(100)
        else:
            sock.sendall(whole)
            if kind == 3:  # reads a little, slowly
                for _ in range(3):
                    sock.recv(rng.randrange(1, 40))
                    time.sleep(rng.random() * 0.01)
            elif kind == 4:  # reads some and resets
                time.sleep(rng.random() * 0.05)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            else:  # closes its sending side, then leaves
                sock.shutdown(socket.SHUT_WR)
                time.sleep(rng.random() * 0.02)


def weather(server: Live) -> None:
    """The storm, and what must hold during and after it."""
    load(server)
    alone = [answer(server, number) for number in range(5)]
    rng = random.Random(SEED)
    turns = [random.Random(rng.random()) for _ in range(200)]
    failures: list[BaseException] = []

    def attack(mine: list[random.Random]) -> None:
        for turn in mine:
            try:
                misbehave(server, turn)
            except OSError:
                continue  # the server closed on it first
            except BaseException as error:
                failures.append(error)

    attackers = [threading.Thread(target=attack, args=(turns[i::10],)) for i in range(10)]
    for attacker in attackers:
        attacker.start()
    during: list[list[str]] = []
    while any(attacker.is_alive() for attacker in attackers) or len(during) < 2:
        during.append([answer(server, number) for number in range(5)])
    for attacker in attackers:
        attacker.join()
    print(f"seed {SEED}, {len(during)} rounds during the storm")
    assert not failures
    assert all(answers == alone for answers in during)
    eventually(lambda: idle(server), 10)
    server.llm().engine.check_integrity()
    assert server.client.get("/health").json()["status"] == "ok"


def test_b28_a_storm_of_bad_clients_changes_no_answer() -> None:
    llm = {"ctx": 1024, "delay": 0.001, "max_seqs": 16}
    with live_scripted(hash_script, llm=llm) as server:
        weather(server)


@pytest.mark.real
def test_b28_a_storm_over_real_weights(tmp_path: Path) -> None:
    with own_home(tmp_path) as store:
        store_model(store, "fake", real_model("smollm2.gguf"))
        with live_store(store, "auto") as server:
            weather(server)
