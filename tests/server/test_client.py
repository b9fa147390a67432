"""The command line's client: what it says of servers that are none, of broken answers, and how it measures."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from edgellm.cli.main import main
from edgellm.cli.server_session import ServerSession
from edgellm.errors import EdgeLLMError, RequestError
from edgellm.server.client import ServerClient
from tests.server.live import live_scripted

HI = [{"role": "user", "content": "Hi"}]
CUT = json.dumps({"message": {"content": "a"}, "done": False}) + "\n"


@pytest.fixture
def strange(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that answers everything with the bytes of the test's parameter; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(request.param)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("strange", [b"", b"<html>", b"[]", b"5", b'{"a": 1}', b'{"models": 5}'], indirect=True)
def test_what_is_no_server_of_models_is_called_that(strange: str) -> None:
    with ServerClient(strange) as client, pytest.raises(EdgeLLMError, match="neither edgellm nor Ollama"):
        client.loaded()


@pytest.mark.parametrize("strange", [b"", b"<html>", b"[]\n", CUT.encode(), CUT.encode() + b"{"], indirect=True)
def test_an_answer_that_breaks_off_is_an_error(strange: str) -> None:
    with ServerClient(strange) as client, pytest.raises(EdgeLLMError, match=r"before the answer.s end|neither"):
        list(client.chat("m", HI))


@pytest.mark.parametrize(
    "words", [["--host", "a b"], ["--host", "\udcff"], ["--api-key", "\xe9"], ["--api-key", "a\n"]]
)
def test_an_address_or_key_that_can_be_none_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", *words]) == 1
    err = capsys.readouterr().err
    assert err.startswith("edgellm: ") and err.count("\n") == 1 and "bug" not in err


def test_a_session_on_a_server_measures_from_the_question_on() -> None:
    messages = [{"role": "user", "content": "x" * 80}]
    with live_scripted("Hello", llm={"delay": 0.05}) as server:
        session = ServerSession("fake", ServerClient(server.url))
        answers = []
        for _ in range(2):
            reply = session.reply(messages, {"temperature": 0.0})
            assert "".join(reply) == "Hello"
            answers.append(reply.answer)
        session.close()
    assert all((answer.ttft_s or 0) >= 0.05 for answer in answers)
    assert answers[0].cached_tokens == 0 and answers[1].cached_tokens >= 64


def test_a_prompt_without_its_template_needs_a_model_here() -> None:
    with live_scripted("Hello") as server, ServerClient(server.url) as client:
        session = ServerSession("fake", client)
        with pytest.raises(RequestError, match="--local"):
            session.continue_text("Hi", {})


OLD = {"name": "m:latest", "size": 1_500_000, "expires_at": "in the far future"}


@pytest.mark.parametrize("strange", [json.dumps({"models": [OLD]}).encode()], indirect=True)
def test_ps_of_an_older_server(strange: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--host", strange]) == 0
    printed = capsys.readouterr().out.split()
    assert printed == ["m:latest", "1.5", "MB", "context", "?", "until", "in", "the", "far", "future"]
