"""Clients that leave, half-close, read slowly, or are there when the server is told to stop: on the real engine over a
scripted model, whose steps take a known time."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.live import Live, live_scripted
from tests.support.scripted import say

MESSAGES = [{"role": "user", "content": "Hi"}]
ENDLESS = say("xy", end=False)
STEP = 0.05


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    text = json.dumps({"model": "fake", "messages": MESSAGES, "input": "Hi", **body}).encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text


def eventually(true: Callable[[], bool], seconds: float = 3.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


def load(server: Live) -> None:
    server.client.post("/api/generate", json={"model": "fake"})


def idle(server: Live) -> bool:
    """Nothing runs or waits, no block is held, nobody uses the model."""
    stats = server.llm().stats()
    used = sum(group["used"] for group in stats["cache_groups"])
    lent = server.state.manager.loaded()[0].users
    return not (stats["running"] or stats["waiting"] or used or lent or server.state.running)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/v1/responses"])
def test_b28_a_reader_that_leaves_frees_its_slot(path: str, reset: bool) -> None:
    with live_scripted(ENDLESS, llm={"delay": STEP}) as server:
        load(server)
        with server.connect() as sock:
            sock.sendall(request_bytes(path, {"stream": True}))
            got = b""
            while got.count(b'"x"') < 2:
                got += sock.recv(4096)
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        before = len(server.llm().engine.runner.steps)
        eventually(lambda: idle(server), 1.0)
        # The step under way, the one whose text shows that nobody reads, and the one in which the news arrives.
        assert len(server.llm().engine.runner.steps) - before <= 3


def test_b28_without_a_stream_the_departure_is_seen_too() -> None:
    with live_scripted(ENDLESS, llm={"delay": STEP}) as server:
        load(server)
        with server.connect() as sock:
            sock.sendall(request_bytes("/api/chat", {"stream": False}))
            eventually(lambda: server.llm().stats()["running"] == 1)
        before = len(server.llm().engine.runner.steps)
        eventually(lambda: idle(server), 1.0)
        assert len(server.llm().engine.runner.steps) - before <= 2


def test_b28_during_a_long_prefill_it_ends_within_one_chunk() -> None:
    llm = {"token_delay": 0.001, "max_batch_tokens": 32, "ctx": 4096}
    with live_scripted(ENDLESS, llm=llm) as server:
        load(server)
        long = [{"role": "user", "content": "x" * 2000}]
        with server.connect() as sock:
            sock.sendall(request_bytes("/api/chat", {"stream": True, "messages": long}))
            eventually(lambda: len(server.llm().engine.runner.steps) >= 2)
        before = len(server.llm().engine.runner.steps)
        eventually(lambda: idle(server), 1.0)
        assert len(server.llm().engine.runner.steps) - before <= 3, "the prefill went on"


def test_b28_a_request_that_still_waits_never_starts() -> None:
    with live_scripted(ENDLESS, llm={"delay": STEP, "max_seqs": 1}) as server:
        load(server)
        with server.connect() as first:
            first.sendall(request_bytes("/api/chat", {"stream": True}))
            first.recv(100)
            with server.connect() as second:
                second.sendall(request_bytes("/api/chat", {"stream": True}))
                eventually(lambda: server.llm().stats()["waiting"] == 1)
            eventually(lambda: server.llm().stats()["waiting"] == 0, 1.0)
        eventually(lambda: idle(server), 1.0)
        assert {item[0] for step in server.llm().engine.runner.steps for item in step} == {0}


@pytest.mark.parametrize("stream", [False, True])
def test_b28_a_client_that_closes_its_sending_side_is_still_served(stream: bool) -> None:
    with live_scripted("Hello!", llm={"delay": STEP}) as server, server.connect() as sock:
        sock.sendall(request_bytes("/api/chat", {"stream": stream}))
        sock.shutdown(socket.SHUT_WR)
        got = b""
        while piece := sock.recv(65536):
            got += piece
        before, _, final = got.partition(b"HTTP/1.1 200 OK")
        assert b'"done":true,"done_reason":"stop"' in final
        # What goes before the answer is what every client must skip.
        assert before.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == b""


def test_b28_fifty_departures_leak_no_block() -> None:
    with live_scripted(ENDLESS, llm={"delay": 0.002}) as server:
        load(server)
        for number in range(50):
            with server.connect() as sock:
                sock.sendall(request_bytes("/api/chat", {"stream": number % 2 == 0}))
                time.sleep(number % 5 * 0.003)
        eventually(lambda: idle(server))
        server.llm().engine.check_integrity()


def test_a_client_that_never_reads_does_not_hold_its_slot() -> None:
    # Enough bytes to fill the buffers on the way: each token comes with twenty alternatives.
    with live_scripted(ENDLESS, llm={"ctx": 8192}, send_timeout=0.3) as server, server.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(request_bytes("/api/chat", {"stream": True, "logprobs": True, "top_logprobs": 20}))
        eventually(lambda: bool(server.state.running))
        eventually(lambda: idle(server), 20.0)
        assert server.client.get("/health").status_code == 200


def test_b14_an_error_after_the_first_byte_ends_the_stream_in_words() -> None:
    def breaks(tokens: Any) -> Any:
        return ValueError("it broke") if bytes(tokens).endswith(b"abc") else say("abc")(tokens)

    with live_scripted(breaks) as server:
        lines = server.client.post("/api/chat", json={"model": "fake", "messages": MESSAGES}).text.splitlines()
        assert list(json.loads(lines[-1])) == ["error"]
        assert not any(json.loads(line).get("done") for line in lines)
        body = {"model": "fake", "messages": MESSAGES, "stream": True}
        events = server.client.post("/v1/chat/completions", json=body).text.split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "api_error"
        whole = server.client.post("/api/chat", json={**body, "stream": False})
        assert whole.status_code == 500 and list(whole.json()) == ["error"]


def test_b14_an_error_before_the_first_byte_has_its_status() -> None:
    with live_scripted(lambda tokens: ValueError("it broke")) as server:
        reply = server.client.post("/api/chat", json={"model": "fake", "messages": MESSAGES})
        assert reply.status_code == 500 and list(reply.json()) == ["error"]


def ask_in_background(server: Live, replies: list[httpx.Response]) -> threading.Thread:
    url, body = f"{server.url}/api/chat", {"model": "fake", "messages": MESSAGES}
    reader = threading.Thread(target=lambda: replies.append(httpx.post(url, json=body, trust_env=False)))
    reader.start()
    eventually(lambda: len(server.state.running) == 1)
    return reader


def test_running_answers_end_before_the_server_does() -> None:
    replies: list[httpx.Response] = []
    with live_scripted("a long answer", llm={"delay": STEP}) as server:
        reader = ask_in_background(server, replies)
        server.server.should_exit = True
        reader.join(10)
    assert json.loads(replies[0].text.splitlines()[-1])["done_reason"] == "stop"


def test_what_outlasts_the_grace_time_is_ended_in_words() -> None:
    replies: list[httpx.Response] = []
    with live_scripted(ENDLESS, llm={"delay": STEP}, grace=0.3) as server:
        reader = ask_in_background(server, replies)
        server.server.should_exit = True
        eventually(lambda: server.state.draining)
        reader.join(10)
    assert json.loads(replies[0].text.splitlines()[-1]) == {"error": "the server is shutting down"}
