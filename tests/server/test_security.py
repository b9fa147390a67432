"""Host and Origin checks, keys, bounds on bodies and time, and clients that break the rules of HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from edgellm.server import protocol
from edgellm.server.security import host_allowed, origin_allowed, origin_patterns
from tests.server.live import Live, live_scripted

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "stream": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live_scripted(max_body=5000, body_timeout=0.3, origins=("https://good.example", "ext://*")) as running:
        yield running


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("", True),
        ("localhost:11434", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("[::1]:80", True),
        ("192.168.1.5:11434", True),
        ("0.0.0.0", True),
        ("box.local", True),
        ("a.localhost", True),
        ("db.internal:1", True),
        ("own-name", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:11434", False),
        ("8.8.8.8", False),
        ("evil.example:127.0.0.1", False),
        ("[::ffff:8.8.8.8]", False),
    ],
)
def test_hosts_that_may_mean_this_machine(host: str, allowed: bool) -> None:
    assert host_allowed(host, "own-name") is allowed


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost", True),
        ("https://localhost:3000", True),
        ("http://127.0.0.1:5173", True),
        ("http://[::1]:8080", True),
        ("app://obsidian.md", True),
        ("vscode-webview://abc", True),
        ("tauri://localhost", True),
        ("file://", True),
        ("http://served.example:9", True),
        ("http://evil.example", False),
        ("http://localhost.evil.example", False),
        ("http://localhost:3000.evil.example", False),
        ("chrome-extension://abc", False),
        ("null", False),
        ("", False),
    ],
)
def test_origins(origin: str, allowed: bool) -> None:
    assert origin_allowed(origin, "http", "served.example:9", origin_patterns(())) is allowed


def test_origins_given_by_the_user() -> None:
    patterns = origin_patterns(("https://good.example", "chrome-extension://*"))
    assert origin_allowed("chrome-extension://abc", "http", "x", patterns)
    assert origin_allowed("https://good.example", "http", "x", patterns)
    assert not origin_allowed("https://goodxexample", "http", "x", patterns)
    assert origin_allowed("https://any.example", "http", "x", origin_patterns(("*",)))


@pytest.mark.parametrize("origin", ["http://localhost:3000", "app://x", "https://good.example", "ext://abc"])
def test_b31_preflight_of_allowed_origins(server: Live, origin: str) -> None:
    # Those that the SDKs send, the last one from every browser.
    asked = "authorization, content-type, x-stainless-os, x-stainless-helper, openai-organization, openai-project"
    asked += ", x-api-key, anthropic-version, anthropic-dangerous-direct-browser-access"
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked}
    reply = server.client.options("/api/chat", headers=headers)
    assert reply.status_code == 204 and reply.content == b""
    assert reply.headers["access-control-allow-origin"] == origin
    offered = {name.strip().lower() for name in reply.headers["access-control-allow-headers"].split(",")}
    assert {name.strip() for name in asked.split(",")} <= offered
    assert "DELETE" in reply.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in reply.headers


def test_paths_that_clients_make_up_are_counted_as_one() -> None:
    with live_scripted(api_key="s3cret") as server:
        for number in range(3):
            assert server.client.options(f"/nothing/{number}", headers={"Origin": "app://x"}).status_code == 204
        page = server.client.get("/metrics", headers={"x-api-key": "s3cret"}).text
    assert 'edgellm_requests_total{path="other",status="204"} 3.0' in page and "/nothing" not in page


def test_b31_a_foreign_origin_gets_nothing(server: Live) -> None:
    for method, path in (
        ("OPTIONS", "/api/chat"),
        ("POST", "/api/chat"),
        ("GET", "/api/tags"),
        ("DELETE", "/api/delete"),
    ):
        reply = server.client.request(method, path, headers={"Origin": "http://evil.example"})
        assert (reply.status_code, reply.content) == (403, b"")
        assert "access-control-allow-origin" not in reply.headers


def test_an_allowed_origin_is_echoed_on_answers_and_errors(server: Live) -> None:
    headers = {"Origin": "http://localhost:3000"}
    for reply in (server.client.get("/api/tags", headers=headers), server.client.get("/nothing", headers=headers)):
        assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert "Origin" in reply.headers["vary"]


def test_dns_rebinding_is_refused(server: Live) -> None:
    reply = server.client.get("/api/tags", headers={"Host": "evil.example:11434"})
    assert (reply.status_code, reply.content) == (403, b"")


def test_the_host_check_is_off_when_others_may_connect() -> None:
    with live_scripted(host="0.0.0.0") as server:
        assert server.client.get("/api/tags", headers={"Host": "box.example"}).status_code == 200


def test_a_key_is_needed_where_one_is_set() -> None:
    with live_scripted(api_key="s3cret") as server:
        get = server.client.get
        assert get("/").status_code == 200
        for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": "s3cret"}, {"Authorization": "Bearer é"}):
            raw = {name: value.encode() for name, value in wrong.items()}
            reply = get("/v1/models", headers=raw)
            assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
        assert get("/api/tags").json() == {"error": "a valid API key is needed: send Authorization: Bearer KEY"}
        assert get("/v1/models", headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert get("/v1/models", headers={"x-api-key": "s3cret"}).status_code == 200
        preflight = server.client.options("/api/chat", headers={"Origin": "http://localhost"})
        assert preflight.status_code == 204


def test_without_a_key_any_key_is_fine(server: Live) -> None:
    assert server.client.get("/v1/models", headers={"Authorization": "Bearer anything"}).status_code == 200


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "missing request body"),
        (b"  \n", "missing request body"),
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"model": NaN}', "NaN"),
        (b'{"messages": ' + b"[" * 2400 + b"]" * 2400 + b"}", "nested too deeply"),
        (b'{"messages": ' + b"[" * 256 + b"]" * 256 + b"}", "nested too deeply"),
        (b'{"messages": ' + b"[" * 255 + b"]" * 255 + b"}", "messages.0"),
        (b'{"model": "\xff"}', "not JSON"),
        (b'{"model": 5}', "model"),
        (b'{"model": "fake", "messages": [{"role": "user", "content": 5}]}', "messages.0.content"),
        (b'{"model": "fake", "messages": [{"content": "x"}]}', "messages.0.role"),
        (b'{"model": "fake", "messages": [{"role": "king", "content": "x"}]}', "king"),
        (b'{"model": "fake", "messages": [], "options": []}', "options"),
        (b'{"model": "fake", "options": {"seed": 1' + b"0" * 4400 + b"}}", "not JSON"),
    ],
)
def test_bad_bodies_are_400_in_words(server: Live, content: bytes, part: str) -> None:
    for path in ("/api/chat", "/v1/chat/completions", "/v1/messages"):
        reply = server.client.post(path, content=content)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert path != "/api/chat" or part in error
        assert "Traceback" not in reply.text


def test_a_body_is_json_whatever_its_content_type_says(server: Live) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; charset=latin-1"):
        reply = server.client.post("/api/chat", content=json.dumps(CHAT), headers={"Content-Type": kind})
        assert reply.status_code == 200


def test_lone_surrogates_do_not_break_an_answer(server: Live) -> None:
    body = b'{"model": "fake", "messages": [{"role": "user", "content": "a\\ud800b"}], "stream": false}'
    assert server.client.post("/api/chat", content=body).status_code == 200
    reply = server.client.post("/api/chat", content=b'{"model": "\\ud800", "messages": []}')
    assert reply.json() == {"error": "model '\ufffd' not found"}


def test_oversize_bodies_are_413(server: Live) -> None:
    reply = server.client.post("/api/chat", content=b" " * 6000)
    assert reply.status_code == 413 and "5000" in reply.json()["error"]
    chunks = (b" " * 1000 for _ in range(10))
    assert server.client.post("/api/chat", content=chunks).status_code == 413


def test_compressed_bodies_are_415(server: Live) -> None:
    reply = server.client.post("/v1/responses", content=b"x", headers={"Content-Encoding": "zstd"})
    assert reply.status_code == 415 and "zstd" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/../etc/passwd", "/api/../../etc/passwd", "/ui/../../app.py", "/ui/%2e%2e/app.py"])
def test_paths_do_not_traverse(server: Live, path: str) -> None:
    assert b"404" in raw_exchange(
        server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )


def test_unknown_paths_and_methods_are_plain_text(server: Live) -> None:
    reply = server.client.get("/api/nothing")
    assert (reply.status_code, reply.text) == (404, "404 page not found")
    reply = server.client.get("/api/chat")
    assert reply.status_code == 405 and reply.headers["content-type"].startswith("text/plain")
    assert server.client.get("/api/tags/").status_code == 404


def raw_exchange(server: Live, data: bytes, wait: float = 5.0) -> bytes:
    """Sends bytes as they are; returns what comes until the server closes or `wait` seconds are over."""
    with server.connect() as sock:
        sock.settimeout(wait)
        sock.sendall(data)
        got = b""
        while True:
            try:
                piece = sock.recv(65536)
            except (TimeoutError, ConnectionResetError):
                return got
            if not piece:
                return got
            got += piece


def test_a_body_that_does_not_come_is_408(server: Live) -> None:
    head = b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    reply = raw_exchange(server, head)
    assert reply.startswith(b"HTTP/1.1 408") and b"no more of the request body" in reply


def test_a_head_that_does_not_come_ends_the_connection(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT", 0.2)
    started = time.monotonic()
    assert raw_exchange(server, b"GET /api/tags HTTP/1.1\r\nHost: loc") == b""
    assert time.monotonic() - started < 4


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_a_400_and_harms_nobody(server: Live, data: bytes) -> None:
    reply = raw_exchange(server, data, wait=1.0)
    assert reply == b"" or reply.startswith(b"HTTP/1.1 4")
    assert server.client.post("/api/chat", json=CHAT).status_code == 200
