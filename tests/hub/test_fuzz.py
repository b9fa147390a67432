"""Fuzzed registries and hubs: nothing is written outside the store, and every end is a typed one-line error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.errors import EdgeLLMError, PullError
from edgellm.hub import manifest as mf
from edgellm.hub import web as web_module
from edgellm.hub.manifest import sha256_bytes
from edgellm.hub.pull import PullOptions, pull
from edgellm.hub.store import Store
from edgellm.hub.web import Web
from tests.support.gguf_bytes import GGUFBytes
from tests.support.origin import Origin, Reply, Request

MODEL = GGUFBytes().text("general.architecture", "llama").build()
DIGEST = f"sha256:{sha256_bytes(MODEL)}"
LAYER = {"mediaType": mf.MODEL, "digest": DIGEST, "size": len(MODEL)}
QUICK = PullOptions(insecure=True, retry_s=0.001, stall_s=0.5, connections=1)

odd = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(max_size=20))
odd = odd | st.sampled_from(["../../x", [], {}])  # type: ignore[list-item]
size = st.just(len(MODEL)) | odd
digests = st.sampled_from([DIGEST, DIGEST.upper(), "sha256:" + "../" * 20 + "a" * 4]) | odd
layer = st.fixed_dictionaries({"mediaType": st.just(mf.MODEL) | odd, "digest": digests, "size": size})
layers = st.lists(layer | odd, max_size=3)
manifest_data = st.fixed_dictionaries({"layers": layers | odd, "config": st.just(LAYER) | odd})
manifests = st.binary(max_size=60) | manifest_data.map(lambda m: json.dumps(m).encode())
odd_values = ["bytes 0-0/1", "bytes 5-9/3", "bytes x", "/x", "//", "http://[", "file:///etc/passwd", "-1", "9" * 30]
header_values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30)
replies = st.builds(
    Reply,
    st.sampled_from([200, 206, 204, 301, 302, 307, 400, 401, 403, 404, 416, 429, 500, 503]),
    st.sampled_from([b"", MODEL, MODEL[:-1], MODEL + b"x", b"\xff" * len(MODEL), b"{", b"<html>"]),
    st.dictionaries(
        st.sampled_from(["Location", "Content-Range", "Retry-After", "ETag", "WWW-Authenticate", "X-Error-Code"]),
        header_values | st.sampled_from(odd_values),
        max_size=3,
    ),
)


def files_under(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def attempt(tmp_path: Path, name: str) -> None:
    """Pulls into a store of its own; typed errors only, and nothing beside the store."""
    store = Store(tmp_path / "store" / "models")
    before = files_under(tmp_path)
    try:
        model = pull(name, store, QUICK)
        assert model.path.read_bytes() == MODEL
    except EdgeLLMError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
    new = files_under(tmp_path) - before
    assert all(path.startswith("store") for path in new), new
    for blob in store.blobs.glob("*"):
        assert blob.name == f"sha256-{sha256_bytes(blob.read_bytes())}"


FUZZ = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    print_blob=True,
)


@FUZZ
@given(manifest=manifests, answers=st.lists(replies, min_size=1, max_size=4))
def test_registry_answers(tmp_path: Path, origin: Origin, manifest: bytes, answers: list[Reply]) -> None:
    queue = list(answers)

    def handle(request: Request) -> Reply:
        if "/manifests/" in request.path:
            return Reply(body=manifest)
        return queue.pop(0) if queue else Reply(404)

    origin.handlers[:] = [handle]
    attempt(tmp_path, f"http://127.0.0.1:{origin.port}/library/m")


paths = st.sampled_from(["x-Q4_K_M.gguf", "../../x.gguf", "/etc/x.gguf", "a/../x.gguf", "x\n.gguf"]) | odd
lfs = st.fixed_dictionaries({"sha256": st.just(DIGEST[7:]) | odd, "size": size})
siblings: Any = st.lists(odd | st.fixed_dictionaries({"rfilename": paths, "lfs": odd | lfs}), max_size=3)


@FUZZ
@given(listing=siblings, commit=odd, answers=st.lists(replies, max_size=3))
def test_hub_answers(tmp_path: Path, origin: Origin, listing: Any, commit: Any, answers: list[Reply]) -> None:
    queue = list(answers)

    def handle(request: Request) -> Reply:
        if request.path.startswith("/api/models"):
            return Reply(body=json.dumps({"siblings": listing, "sha": commit}).encode())
        return queue.pop(0) if queue else Reply(200, MODEL)

    origin.handlers[:] = [handle]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", origin.url)
        attempt(tmp_path, "hf.co/u/r")


def refused(origin_url: str, target: str, patch: pytest.MonkeyPatch, public: bool = True) -> str:
    """What is said of a redirect from a host to `target`; `public`: as if the first host were a public one."""
    own = web_module.is_local
    first = web_module.origin(origin_url)[1]
    if public:
        patch.setattr(web_module, "is_local", lambda host, resolve=True: host != first and own(host, resolve))
    with Web(True) as web, pytest.raises(PullError) as caught:
        web.read(origin_url)
    return str(caught.value)


TARGETS = [
    "http://127.0.0.2/x",
    "http://localhost:1/x",
    "http://[::1]/x",
    "http://10.0.0.1/x",
    "http://169.254.169.254/x",
]
TARGETS += [
    "http://192.168.1.1/",
    "http://[fe80::1]/",
    "http://0.0.0.0/",
    "http://100.64.0.1/",
    "http://[::ffff:10.0.0.1]/",
]


@pytest.mark.parametrize("target", TARGETS)
def test_redirects_into_this_network_are_refused(target: str, origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    origin.handle(lambda r: Reply(302, headers={"Location": target}))
    assert "inside this network" in refused(origin.url, target, monkeypatch)
    assert len(origin.requests) == 1


def test_redirects_to_other_schemes_and_in_circles(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/"):
        origin.handlers[:] = [lambda r, target=target: Reply(302, headers={"Location": target})]
        assert "only http and https" in refused(origin.url, target, monkeypatch, public=False)
    origin.handlers[:] = [lambda r: Reply(302, headers={"Location": "/again"})]
    assert "redirects too often" in refused(origin.url, "", monkeypatch, public=False)
    with Web() as web, pytest.raises(PullError, match="from https to plain http"):
        web._check_target("https://example.com/", "http://example.com/")
