"""What a hub or a registry refuses, and what is refused before one is asked: the words a user reads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from edgellm.errors import EdgeLLMError, ModelNotFound, PullError, RequestError, UnsupportedModel
from edgellm.hub.fetch import Fetcher
from edgellm.hub.pull import PullOptions, pull
from edgellm.hub.store import Store
from edgellm.hub.web import Answer, Location, Web
from tests.support.hubs import model_file
from tests.support.origin import Origin, Reply

QUICK = PullOptions(insecure=True, retry_s=0.01, stall_s=5.0)


def test_errors_of_the_hub(origin: Origin, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", origin.url)
    answers = {
        "u/gated": Reply(403, headers={"X-Error-Code": "GatedRepo"}),
        "u/none": Reply(401, headers={"X-Error-Code": "RepoNotFound"}),
        "u/busy": Reply(429, b'{"error":"rate limit"}'),
        "u/odd": Reply(200, b"<html>"),
    }
    origin.handle(lambda r: next((a for name, a in answers.items() if name in r.path), None))
    for name, words in {"gated": "gated: open .* HF_TOKEN", "none": "private", "busy": "limits", "odd": "JSON"}.items():
        with pytest.raises(PullError, match=words):
            pull(f"hf.co/u/{name}", store, QUICK)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PullError, match="HF_HUB_OFFLINE"):
        pull("hf.co/u/r", store, QUICK)


def test_errors_of_a_registry(origin: Origin, store: Store) -> None:
    with pytest.raises(PullError, match="pull model manifest: file does not exist"):
        pull(f"http://127.0.0.1:{origin.port}/library/none", store, QUICK)
    with pytest.raises(RequestError, match="--insecure"):
        pull(f"http://127.0.0.1:{origin.port}/library/none", store)
    with pytest.raises(RequestError, match="--insecure"):
        pull("http://example.com/x.gguf", store)
    with pytest.raises(PullError, match=r"cannot reach 127\.0\.0\.1:9: "):
        pull("http://127.0.0.1:9/library/none", store, QUICK)
    with pytest.raises(RequestError, match="runs where it lies"):
        pull("/tmp/x.gguf", store)
    with pytest.raises(ModelNotFound, match="Ollama's servers"):
        pull("gpt-oss:120b-cloud", store)
    origin.handle(lambda r: Reply(200, b'{"layers": []}') if "empty" in r.path else None)
    with pytest.raises(UnsupportedModel):
        pull(f"http://127.0.0.1:{origin.port}/library/empty", store, QUICK)


@pytest.mark.parametrize("whole", [True, False])
def test_a_name_that_leads_into_this_network_by_now_is_refused(origin: Origin, tmp_path: Path, whole: bool) -> None:
    """The address was a public one when it was looked up (`local` is False)."""
    origin.file("/x.gguf", model_file(tmp_path / "x.gguf", 4096))
    size, came = (tmp_path / "x.gguf").stat().st_size, bytearray()
    with Web() as web, pytest.raises(PullError, match="inside this network"):
        fetcher = Fetcher(web, lambda: Location(f"{origin.url}/x.gguf", size=size), size, threading.Event())
        fetcher.read_all(came.extend) if whole else fetcher.read_range(0, size, came.extend)
    assert not came


def test_of_a_refusal_only_the_beginning_is_read(origin: Origin) -> None:
    """Of a chunk of 1 GB that the server announces; it hangs up after 4 KB, which nobody may come to."""
    body = b"%x\r\n" % (1 << 30) + b"no such file; " + b"x" * 4096
    origin.handle(lambda r: Reply(404, body, {"Transfer-Encoding": "chunked", "Content-Length": "1"}))
    with Web(timeout=5.0) as web:
        found = web.locate(f"{origin.url}/x.gguf")
    assert isinstance(found, Answer) and len(found.body) == 2000 and "404 no such file; x" in found.reason()


def test_every_error_is_one_line(origin: Origin, store: Store) -> None:
    origin.handle(lambda r: Reply(418, b"a\nb\x1b[31m\n" * 50))
    with pytest.raises(EdgeLLMError) as caught:
        pull(f"http://127.0.0.1:{origin.port}/library/m", store, QUICK)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_settings_that_are_no_address(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an IPv6 address, which Python's own parser raises at, in every place that a user writes one."""
    for name in ("http://[::1", "https://[::1/x.gguf"):
        with pytest.raises(RequestError, match="is no address"):
            pull(name, store, QUICK)
    with monkeypatch.context() as patch:
        patch.setenv("http_proxy", "http://[::1")
        with pytest.raises(PullError, match="proxy or certificate settings"):
            pull("hf.co/u/r", store, QUICK)
    monkeypatch.setenv("HF_ENDPOINT", "http://user:secret@[::1")
    with pytest.raises(PullError, match="is no usable address") as caught:
        pull("hf.co/u/r", store, QUICK)
    assert "secret" not in str(caught.value)
