"""Clients that leave, half-close, read slowly, or are there when the server is told to stop."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.fake_llm import FakeLLM
from tests.server.live import Live, live_fake

MESSAGES = [{"role": "user", "content": "Hi"}]


def request_bytes(path: str, body: dict[str, Any], version: str = "1.1") -> bytes:
    text = json.dumps({"model": "fake", "messages": MESSAGES, **body}).encode()
    return f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text


def connect(server: Live) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    sock = socket.create_connection((host, int(port)))
    sock.settimeout(10)
    return sock


def eventually(true: Callable[[], bool], seconds: float = 3.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/v1/responses"])
def test_b28_a_reader_that_leaves_frees_its_slot(path: str, reset: bool) -> None:
    llm = FakeLLM(pieces=["x"] * 1000, delay=0.02)
    with live_fake(llm) as server:
        with connect(server) as sock:
            body = {"stream": True, "input": "Hi"}
            sock.sendall(request_bytes(path, body))
            got = b""
            while got.count(b"x") < 3:
                got += sock.recv(4096)
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        eventually(lambda: llm.cancelled == 1)
        assert not server.state.running
        eventually(lambda: server.state.manager.loaded()[0].users == 0)


def test_b28_without_a_stream_the_departure_is_seen_too() -> None:
    llm = FakeLLM(pieces=["x"] * 1000, delay=0.02)
    with live_fake(llm) as server:
        with connect(server) as sock:
            sock.sendall(request_bytes("/api/chat", {"stream": False}))
            eventually(lambda: len(llm.prompts) == 1)
        eventually(lambda: llm.cancelled == 1, 1.0)
        eventually(lambda: server.state.manager.loaded()[0].users == 0)


def test_b28_before_the_first_token_the_departure_is_seen_too() -> None:
    llm = FakeLLM(pieces=["x"] * 3, delay=1.5)
    with live_fake(llm) as server:
        with connect(server) as sock:
            sock.sendall(request_bytes("/api/chat", {"stream": True}))
            eventually(lambda: len(llm.prompts) == 1)
        eventually(lambda: llm.cancelled == 1, 1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_b28_a_client_that_closes_its_sending_side_is_still_served(stream: bool) -> None:
    llm = FakeLLM(pieces=["Hel", "lo", "!"], delay=0.1)
    with live_fake(llm) as server, connect(server) as sock:
        sock.sendall(request_bytes("/api/chat", {"stream": stream}))
        sock.shutdown(socket.SHUT_WR)
        got = b""
        while piece := sock.recv(65536):
            got += piece
        final = got.partition(b"HTTP/1.1 200 OK")[2]
        assert b'"done":true' in final and llm.cancelled == 0
        assert all(head == b"HTTP/1.1 100 Continue\r\n\r\n" for head in split_heads(got.partition(b"HTTP/1.1 200")[0]))


def split_heads(data: bytes) -> list[bytes]:
    return [head + b"\r\n\r\n" for head in data.split(b"\r\n\r\n") if head]


def test_a_client_that_never_reads_does_not_hold_its_slot() -> None:
    llm = FakeLLM(pieces=["x" * 20_000] * 400)
    with live_fake(llm, send_timeout=0.3) as server:
        with connect(server) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(request_bytes("/api/chat", {"stream": True}))
            eventually(lambda: len(llm.prompts) == 1)
            eventually(lambda: not server.state.running, 5.0)
            assert server.state.manager.loaded()[0].users == 0
        assert server.client.get("/health").status_code == 200


def test_an_error_after_the_first_byte_ends_the_stream_in_words() -> None:
    llm = FakeLLM(error=ValueError("secret path /x"))
    with live_fake(llm) as server:
        lines = server.client.post("/api/chat", json={"model": "fake", "messages": MESSAGES}).text.splitlines()
        last = json.loads(lines[-1])
        assert list(last) == ["error"] and "secret" not in last["error"]
        assert not any(json.loads(line).get("done") for line in lines)
        events = server.client.post(
            "/v1/chat/completions", json={"model": "fake", "messages": MESSAGES, "stream": True}
        ).text.split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "api_error"


def test_running_answers_end_before_the_server_does() -> None:
    llm = FakeLLM(pieces=["a"] * 20, delay=0.05)
    replies: list[httpx.Response] = []
    with live_fake(llm) as server:
        url = f"{server.url}/api/chat"
        body = {"model": "fake", "messages": MESSAGES}
        reader = threading.Thread(target=lambda: replies.append(httpx.post(url, json=body, trust_env=False)))
        reader.start()
        eventually(lambda: len(server.state.running) == 1)
        server.server.should_exit = True
        reader.join(10)
    assert json.loads(replies[0].text.splitlines()[-1])["done_reason"] == "stop"
    assert llm.closed


def test_what_outlasts_the_grace_time_is_ended_in_words() -> None:
    llm = FakeLLM(pieces=["a"] * 1000, delay=0.05)
    replies: list[httpx.Response] = []
    with live_fake(llm, grace=0.3) as server:
        url = f"{server.url}/api/chat"
        body = {"model": "fake", "messages": MESSAGES}
        reader = threading.Thread(target=lambda: replies.append(httpx.post(url, json=body, trust_env=False)))
        reader.start()
        eventually(lambda: len(server.state.running) == 1)
        server.server.should_exit = True
        eventually(lambda: server.state.draining)
        reader.join(10)
    assert json.loads(replies[0].text.splitlines()[-1]) == {"error": "the server is shutting down"}
