"""Case B29 and the downloader: what arrives wrong, cut, late or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
import time
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from edgellm.errors import (
    CancelledError,
    PullError,
    StoreError,
)
from edgellm.hub.journal import Partial
from edgellm.hub.manifest import MODEL
from edgellm.hub.pull import Event, PullOptions, partials, pull, remove_partials
from edgellm.hub.store import Store, StoredModel
from edgellm.loader import open_gguf
from tests.support.gguf_bytes import F32, GGUFBytes, write_shards
from tests.support.hubs import model_file, serve_hub, serve_registry, sha256
from tests.support.origin import Origin, Reply

QUICK = PullOptions(insecure=True, retry_s=0.01, stall_s=5.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of about 3 MB: a dozen parts."""
    return model_file(tmp_path / "x-Q4_K_M.gguf", 3 << 20)


def registry_name(origin: Origin) -> str:
    return f"http://127.0.0.1:{origin.port}/library/m"


def get(origin: Origin, store: Store, **options: Any) -> StoredModel:
    chosen = PullOptions(**{**vars(QUICK), **options})
    return pull(registry_name(origin), store, chosen)


def test_pull_from_a_registry(origin: Origin, store: Store, model: Path) -> None:
    serve_registry(origin, "library/m", [(MODEL, model)])
    events: list[Event] = []
    found = pull(registry_name(origin), store, QUICK, events.append)
    assert found.path.read_bytes() == model.read_bytes() and found.path.name == f"sha256-{sha256(model)}"
    assert [e["status"] for e in events[:1] + events[-3:]] == [
        "pulling manifest",
        "verifying sha256 digest",
        "writing manifest",
        "success",
    ]
    counts = [e["completed"] for e in events if e.get("total") == model.stat().st_size and "completed" in e]
    assert counts == sorted(counts) and counts[-1] == model.stat().st_size
    assert sorted(os.listdir(store.partial)) == []
    before = len(origin.requests)
    again = pull(registry_name(origin), store, QUICK)
    assert again == found and len(origin.requests) == before + 1  # the manifest alone


def test_b29_wrong_byte_is_kept_aside_and_replaced(origin: Origin, store: Store, model: Path) -> None:
    (how,) = serve_registry(origin, "library/m", [(MODEL, model)])
    how.flip_at = 1_000_000
    flipped = bytearray(model.read_bytes())
    flipped[1_000_000] ^= 0xFF
    with pytest.raises(PullError) as caught:
        get(origin, store)
    assert sha256(model) in str(caught.value) and hashlib.sha256(flipped).hexdigest() in str(caught.value)
    assert store.names() == [] and not (store.blobs / f"sha256-{sha256(model)}").exists()
    (entry,) = partials(store)
    assert entry["bad"] and "m:latest" in entry["label"] and entry["size"] == model.stat().st_size
    with pytest.raises(PullError, match="digest mismatch"):  # the origin is still wrong
        get(origin, store)
    how.flip_at = None
    before = origin.asked(next(iter(origin.files)))
    assert get(origin, store).path.read_bytes() == model.read_bytes()
    again = origin.asked(next(iter(origin.files))) - before
    assert again < model.stat().st_size  # done as soon as the part that differed was replaced
    assert partials(store) == []


def test_b29_empty_answer_is_a_transport_error(origin: Origin, store: Store, model: Path) -> None:
    serve_registry(origin, "library/m", [(MODEL, model)])
    where = f"/v2/library/m/blobs/sha256:{sha256(model)}"
    origin.handlers.insert(0, lambda r: Reply(200) if r.path == where else None)
    with pytest.raises(PullError, match="has 0 bytes, but"):
        get(origin, store)
    assert not list(store.blobs.glob("*")) and store.names() == []


def test_b29_empty_part_is_a_transport_error(origin: Origin, store: Store, model: Path) -> None:
    (how,) = serve_registry(origin, "library/m", [(MODEL, model)])
    how.cut_after = 1  # each range ends after a byte; the probe of one byte is whole
    how.cuts = 3
    assert get(origin, store).path.read_bytes() == model.read_bytes()
    where = f"/v2/library/m/blobs/sha256:{sha256(model)}"
    origin.handlers.insert(0, lambda r: Reply(206) if r.path == where and r.range != (0, 0) else None)
    other = Store(store.root.parent / "other")
    with pytest.raises(PullError, match="gave up after 6 tries"):
        get(origin, other)
    assert store.names() and other.names() == []


def test_b29_full_disk(origin: Origin, store: Store, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pwrite` says ENOSPC half-way; one clear error, no second try, and the same process resumes later."""
    serve_registry(origin, "library/m", [(MODEL, model)])
    true_write, room = os.pwrite, [model.stat().st_size // 2]

    def pwrite(handle: int, data: Any, offset: int) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= len(data)
        return true_write(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StoreError, match="no space left"):
        get(origin, store, connections=1)
    where = f"/v2/library/m/blobs/sha256:{sha256(model)}"
    asked = origin.asked(where)
    assert asked < model.stat().st_size
    (entry,) = partials(store)
    assert entry["completed"] > 0 and not entry["bad"]
    room[0] = 1 << 40
    assert get(origin, store).path.read_bytes() == model.read_bytes()
    assert origin.asked(where) - model.stat().st_size <= asked - entry["completed"]


def test_disk_is_checked_before_the_first_byte(
    origin: Origin, store: Store, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_registry(origin, "library/m", [(MODEL, model)])
    usage = shutil.disk_usage(store.root.parent.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(StoreError, match=r"no space: .* needs 0\.00 GB more"):
        get(origin, store)
    assert origin.asked(f"/v2/library/m/blobs/sha256:{sha256(model)}") == 0


def test_store_that_cannot_be_written(origin: Origin, tmp_path: Path, model: Path) -> None:
    serve_registry(origin, "library/m", [(MODEL, model)])
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match="cannot be written"):
        get(origin, Store(tmp_path / "file" / "models"))
    if os.path.isdir("/sys/kernel"):  # a file system that is read-only even for root
        with pytest.raises(StoreError, match=r"cannot be written|set EDGELLM_HOME"):
            get(origin, Store(Path("/sys/kernel/edgellm")))


@pytest.mark.parametrize("same", [True, False])
def test_b29_token_stays_with_its_origin(
    same: bool, origin: Origin, storage: Origin, store: Store, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_hub(origin, "u/r", {"x-Q4_K_M.gguf": model}, cdn=None if same else storage)
    monkeypatch.setenv("HF_ENDPOINT", origin.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = pull("hf.co/u/r", store, QUICK)
    assert found.path.read_bytes() == model.read_bytes()
    assert {r.headers.get("authorization") for r in origin.requests} == {"Bearer hf_secret"}
    assert len(origin.requests) > (2 if same else 1)
    assert {r.headers.get("authorization") for r in storage.requests} <= {None}
    assert bool(storage.requests) is not same


def test_server_that_ignores_range(origin: Origin, store: Store, model: Path) -> None:
    (how,) = serve_registry(origin, "library/m", [(MODEL, model)])
    how.ranges = False
    how.cut_after, how.cuts = 1_500_000, 2
    assert get(origin, store).path.read_bytes() == model.read_bytes()


def test_server_that_stops_serving_ranges(origin: Origin, store: Store, model: Path) -> None:
    (how,) = serve_registry(origin, "library/m", [(MODEL, model)])

    def count(request: Any) -> None:
        if sum(r.range is not None for r in origin.requests) > 4:
            how.ranges = False

    origin.handlers.insert(0, count)
    assert get(origin, store).path.read_bytes() == model.read_bytes()


def test_lines_that_are_cut_or_silent(origin: Origin, store: Store, model: Path) -> None:
    (how,) = serve_registry(origin, "library/m", [(MODEL, model)])
    how.cut_after, how.cuts = 100_000, 5
    how.silent_after, how.silences = 70_000, 2
    assert get(origin, store, stall_s=0.4).path.read_bytes() == model.read_bytes()


def test_server_that_breaks_for_good(origin: Origin, store: Store, model: Path) -> None:
    serve_registry(origin, "library/m", [(MODEL, model)])
    where = f"/v2/library/m/blobs/sha256:{sha256(model)}"
    origin.handlers.insert(0, lambda r: Reply(500) if r.path == where and r.range != (0, 0) else None)
    with pytest.raises(PullError, match=r"answers 500.*gave up after 6 tries.*pull again"):
        get(origin, store, connections=1)


def test_429_waits_as_told(origin: Origin, store: Store, model: Path) -> None:
    serve_registry(origin, "library/m", [(MODEL, model)])
    told = iter(["1", "0", "Wed, 21 Oct 2015 07:28:00 GMT"])

    def limit(request: Any) -> Reply | None:
        if request.range and request.range != (0, 0) and (after := next(told, None)):
            return Reply(429, headers={"Retry-After": after})
        return None

    origin.handlers.insert(0, limit)
    assert get(origin, store, connections=1).path.read_bytes() == model.read_bytes()
    other = Store(store.root.parent / "other")
    origin.handlers[0] = lambda r: Reply(429, headers={"Retry-After": "86400"}) if r.range else None
    with pytest.raises(PullError, match="429"):
        get(origin, other)


def test_expired_addresses_are_renewed(origin: Origin, storage: Origin, store: Store, model: Path) -> None:
    serve_registry(origin, "library/m", [(MODEL, model)], storage=storage)
    served = [0]

    def expire(request: Any) -> Reply | None:
        served[0] += 1
        return Reply(403, b"<Error>Request has expired</Error>") if served[0] % 5 == 0 else None

    storage.handle(expire)
    assert get(origin, store).path.read_bytes() == model.read_bytes()
    asked = [r for r in origin.requests if "/blobs/" in r.path]
    assert len(asked) > 2  # the registry was asked for fresh addresses
    storage.handlers[0] = lambda r: Reply(403, b"no") if r.range != (0, 0) else None
    with pytest.raises(PullError, match="answers 403"):
        get(origin, Store(store.root.parent / "other"))


def test_proxy_of_the_environment_is_used(
    origin: Origin, storage: Origin, store: Store, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_registry(storage, "library/m", [(MODEL, model)])
    monkeypatch.setenv("http_proxy", storage.url)
    found = pull("http://registry.example.test/library/m", store, PullOptions(**{**vars(QUICK), "connections": 2}))
    assert found.path.read_bytes() == model.read_bytes() and origin.requests == []
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(PullError, match="through the proxy"):
        pull("http://registry.example.test/library/n", store, QUICK)


def test_damage_on_disk_refetches_only_the_bad_part(origin: Origin, store: Store, model: Path) -> None:
    serve_registry(origin, "library/m", [(MODEL, model)])
    where = f"/v2/library/m/blobs/sha256:{sha256(model)}"
    part = 256 << 10
    partial = Partial(store.partial, f"sha256-{sha256(model)}", model.stat().st_size, "m")
    data = model.read_bytes()
    for i in range(partial.geometry.n_parts):
        piece = data[i * part : (i + 1) * part]
        partial.write(i * part, piece if i != 3 else bytes(len(piece)))  # the disk lost part 3
        partial.note([(i, f"{zlib.crc32(piece):08x}")])
    partial.close()
    assert get(origin, store).path.read_bytes() == data
    assert origin.asked(where) == part


def test_one_pull_per_blob(origin: Origin, store: Store, model: Path) -> None:
    (how,) = serve_registry(origin, "library/m", [(MODEL, model)])
    how.rate = 4e6
    found: list[StoredModel] = []
    threads = [threading.Thread(target=lambda: found.append(get(origin, store))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3 and len({m.digest for m in found}) == 1
    assert origin.asked(f"/v2/library/m/blobs/sha256:{sha256(model)}") == model.stat().st_size


def test_stop_keeps_what_came(origin: Origin, store: Store, model: Path) -> None:
    (how,) = serve_registry(origin, "library/m", [(MODEL, model)])
    how.rate = 2e6
    stop = threading.Event()

    def on_event(event: Event) -> None:
        if event.get("completed", 0) > 1_000_000:
            stop.set()

    with pytest.raises(CancelledError):
        pull(registry_name(origin), store, QUICK, on_event, stop)
    (entry,) = partials(store)
    assert entry["completed"] > 0
    how.rate = 0
    get(origin, store)
    again = origin.asked(f"/v2/library/m/blobs/sha256:{sha256(model)}") - model.stat().st_size
    assert again <= 5 * (256 << 10)


def test_bandwidth_cap(origin: Origin, store: Store, model: Path) -> None:
    """Three booked megabytes at 30 MB/s cannot arrive before their time."""
    serve_registry(origin, "library/m", [(MODEL, model)])
    start = time.monotonic()
    get(origin, store, limit_rate=30e6)
    assert time.monotonic() - start >= 0.9 * model.stat().st_size / 30e6


def test_partials_are_listed_and_removed(origin: Origin, store: Store, model: Path) -> None:
    (how,) = serve_registry(origin, "library/m", [(MODEL, model)])
    how.flip_at = 5
    with pytest.raises(PullError):
        get(origin, store)
    assert remove_partials(store, "other") == []
    (label,) = remove_partials(store)
    assert "m:latest" in label and partials(store) == [] and os.listdir(store.partial) == []


def test_split_model_from_the_hub(
    origin: Origin, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [GGUFBytes().text("general.architecture", "llama"), GGUFBytes()]
    for i, part in enumerate(parts):
        part.tensor(f"t{i}", F32, [4], bytes(16))
    paths = write_shards(tmp_path, "m-Q8_0", parts)
    serve_hub(origin, "u/r", {f"Q8_0/{p.name}": p for p in paths})
    monkeypatch.setenv("HF_ENDPOINT", origin.url)
    found = pull("hf.co/u/r:q8_0", store, QUICK)
    with open_gguf(found.path) as file:
        assert sorted(file.tensors) == ["t0", "t1"]
    store.remove(found.name)
    assert not list(store.blobs.glob("*")) and not list((store.root / "split").glob("*"))


def test_url(origin: Origin, store: Store, model: Path) -> None:
    origin.file("/a/my%20model.gguf", model)
    found = pull(f"{origin.url}/a/my%20model.gguf?sig=1", store, QUICK)
    assert found.path.read_bytes() == model.read_bytes() and found.name.model == "my-model"
    origin.handle(lambda r: Reply(200, b"<html>sign in</html>") if r.path == "/b.gguf" else None)
    with pytest.raises(PullError, match="web page"):
        pull(f"{origin.url}/b.gguf", store, QUICK)
    with pytest.raises(PullError, match="answers 404"):
        pull(f"{origin.url}/none.gguf", store, QUICK)


def test_a_host_is_the_same_in_capitals(origin: Origin, store: Store, model: Path) -> None:
    serve_registry(origin, "library/m", [(MODEL, model)])
    name = f"LocalHost:{origin.port}/library/m"
    assert pull(name, store, QUICK).path.read_bytes() == model.read_bytes()


@pytest.mark.parametrize("own", ["", "?account=a"])
def test_anonymous_token_after_a_401(origin: Origin, store: Store, model: Path, own: str) -> None:
    """`own`: a query that the realm's address has already."""
    serve_registry(origin, "library/m", [(MODEL, model)])

    def guard(request: Any) -> Reply | None:
        if request.path == "/token":
            assert "authorization" not in request.headers
            assert parse_qs(request.query)["service"] == ["r"] and request.query.startswith(own[1:])
            return Reply(200, b'{"token": "anonymous"}')
        if request.headers.get("authorization") != "Bearer anonymous":
            told = f'Bearer realm="{origin.url}/token{own}",service="r",scope="repository:library/m:pull"'
            return Reply(401, headers={"WWW-Authenticate": told})
        return None

    origin.handlers.insert(0, guard)
    assert get(origin, store).path.read_bytes() == model.read_bytes()
    told = 'Bearer realm="http://example.com/token"'
    origin.handlers[0] = lambda r: Reply(401, headers={"WWW-Authenticate": told})
    with pytest.raises(PullError, match="private or does not exist"):
        get(origin, Store(store.root.parent / "other"))
