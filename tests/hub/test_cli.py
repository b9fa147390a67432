"""The commands around the store: pull, list, show, run, cp, verify, plan, create, rm."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from edgellm.cli.main import main
from edgellm.hub.disk import locked
from edgellm.hub.pull import partials
from edgellm.hub.store import Store
from tests.support.hubs import model_file, serve_hub
from tests.support.origin import Origin
from tests.support.tiny import tiny_gguf


@pytest.fixture
def hub(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub with one tiny model that runs, in a file called Q8_0."""
    path = tiny_gguf(tmp_path / "tiny-Q8_0.gguf")
    serve_hub(origin, "u/tiny-GGUF", {path.name: path})
    monkeypatch.setenv("HF_ENDPOINT", origin.url)
    return path


def says(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> tuple[str, str]:
    """Runs a command, checks its exit code, and gives stdout and stderr."""
    assert main(list(words)) == code
    return capsys.readouterr()


def test_who_waits_for_another_process_says_so_once(
    hub: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = hashlib.sha256(hub.read_bytes()).hexdigest()
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(store.partial / f"sha256-{digest}.lock"):
            taken.set()
            release.wait(30)

    other = threading.Thread(target=hold)
    other.start()
    assert taken.wait(10)
    threading.Timer(1.3, release.set).start()  # two or three looks at the lock
    _, err = says(capsys, 0, "pull", "hf.co/u/tiny-GGUF")
    other.join()
    assert err.count("waiting for another process") == 1 and err.endswith("success\n")


def test_pull_list_run_and_remove(hub: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = says(capsys, 0, "pull", "hf.co/u/tiny-GGUF")
    assert out == "" and "fits this machine" in err and err.endswith("success\n")
    out, _ = says(capsys, 0, "list")
    assert out.split("\n")[0].split() == ["NAME", "ID", "SIZE", "MODIFIED", "IN"]
    assert "hf.co/u/tiny-GGUF:latest" in out and out.count("\n") == 2
    flags = ["-n", "3", "--temperature", "0", "--json", "--backend", "reference"]
    out, _ = says(capsys, 0, "run", "hf.co/U/Tiny-gguf", "abc", *flags)
    assert json.loads(out)["new_tokens"] == 3
    out, _ = says(capsys, 0, "show", "hf.co/u/tiny-GGUF", "--json")
    assert json.loads(out)["architecture"] == "llama"
    says(capsys, 0, "cp", "hf.co/u/tiny-GGUF", "Tiny")
    _, err = says(capsys, 0, "rm", "tiny", "hf.co/u/tiny-GGUF")
    assert "removed Tiny:latest" in err and store.names() == [] and list(store.blobs.iterdir()) == []
    _, err = says(capsys, 1, "run", "tiny", "abc")
    assert err == "edgellm: no model named tiny is here; get it with: edgellm pull tiny\n"


def test_create_refuses_what_would_fail_in_every_answer(
    hub: Path, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Modelfile").write_text(f"FROM {hub.name}\nPARAMETER top_p 1.5\n")
    _, err = says(capsys, 1, "create", "other", "-f", str(tmp_path / "Modelfile"))
    assert "top_p" in err and err.count("\n") == 1
    assert store.models() == []


def test_create_and_verify(hub: Path, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Modelfile").write_text(f"FROM {hub.name}\nPARAMETER temperature 0\nSYSTEM Be brief.\n")
    _, err = says(capsys, 0, "create", "mine", "-f", str(tmp_path / "Modelfile"))
    assert err.endswith("created mine:latest\n")
    out, _ = says(capsys, 0, "verify", "mine", "--scan", "--json")
    report = json.loads(out)
    assert report["problems"] == [] and report["scanned"] == report["tensors"] > 0
    assert report["hashed_bytes"] == store.models()[0].size
    blob = store.models()[0].path
    blob.write_bytes(blob.read_bytes()[:-1] + b"\xff")
    _, err = says(capsys, 1, "verify", "mine")
    assert "is damaged" in err and "set aside" in err
    out, _ = says(capsys, 0, "list", "--partial")
    assert "mine:latest" in out and "wrong digest" in out
    _, err = says(capsys, 0, "rm", "--partial")
    assert "removed 1 unfinished download" in err and partials(store) == []
    _, err = says(capsys, 1, "create", "x", "-f", str(tmp_path / "none"))
    assert err.count("\n") == 1 and "cannot be read" in err


def test_plan_of_a_file_and_of_a_remote_model(hub: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    plans = [
        json.loads(says(capsys, 0, "plan", m, "--machine", "m1-16gb", "--json")[0])
        for m in (str(hub), "hf:u/tiny-GGUF")
    ]
    for plan in plans:
        plan.pop("model")
    assert plans[0] == plans[1] and store.names() == []
    wanted = (
        "weights_bytes kv_bytes_per_token kv_bytes scratch_bytes draft_bytes runtime_bytes total_bytes budget_bytes"
    )
    assert {*wanted.split(), "fits", "max_ctx", "tok_s_ceiling"} <= plans[0].keys() and plans[0]["fits"] is True
    out, _ = says(capsys, 0, "plan", str(hub), "--memory", "1M", "--machine", "m1-8gb")
    assert "does not fit m1-8gb" in out and "instead: " in out
    assert "it fits within 1.0 MB: none of the table" in out
    for draft in ("lookup", f"lookup,{hub}"):  # as `run` takes them
        out, _ = says(capsys, 0, "plan", str(hub), "--machine", "m1-16gb", "--draft", draft, "--json")
        assert (json.loads(out)["draft_bytes"] > 0) == ("," in draft)
    _, err = says(capsys, 1, "plan", str(hub), "--machine", "abacus")
    assert "no machine named 'abacus'" in err and err.count("\n") == 1


def test_server_without_ranges_is_planned_and_pulled(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own file server knows no ranges; this header is longer than the first look at it."""
    (tmp_path / "served").mkdir()
    path = tiny_gguf(tmp_path / "served" / "tiny.gguf", vocab_size=20_000)
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(path.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            port = re.search(r"port (\d+)", server.stdout.readline())
            assert port is not None
            url = f"http://127.0.0.1:{port[1]}/tiny.gguf"
            out, _ = says(capsys, 0, "plan", url, "--json")
            there = json.loads(out)["weights_bytes"]
            _, err = says(capsys, 0, "pull", url)
        finally:
            server.kill()
    assert there == json.loads(says(capsys, 0, "plan", str(path), "--json")[0])["weights_bytes"]
    assert "fits this machine" in err and err.endswith("success\n")
    (name,) = store.names()
    model = store.get(name)
    assert model is not None and model.path.read_bytes() == path.read_bytes()


def test_wrong_usage(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert says(capsys, 2, "rm")[1].startswith("Usage")
    assert "runs where it lies" in says(capsys, 1, "pull", "./x.gguf")[1]
    for wrong, why in (("a b", "is not a model name: 'a b' cannot be its model"), ("", "none was given")):
        err = says(capsys, 1, "pull", wrong)[1]
        assert why in err and err.count("\n") == 1
    assert "no models yet" in says(capsys, 0, "list")[1]
    assert json.loads(says(capsys, 0, "list", "--json")[0]) == {"models": []}


def test_ctrl_c_keeps_what_came(origin: Origin, store: Store, tmp_path: Path) -> None:
    path = model_file(tmp_path / "x-Q4_K_M.gguf", 6 << 20)
    how = serve_hub(origin, "u/r", {path.name: path})
    how[path.name].rate = 1e6
    command = [sys.executable, "-m", "edgellm", "pull", "hf.co/u/r", "--yes"]
    child = subprocess.Popen(command, env={**os.environ, "HF_ENDPOINT": origin.url}, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (found := partials(store)) or not found[0]["completed"]:
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and "what came is kept, go on with: edgellm pull hf.co/u/r" in err
    assert "Traceback" not in err and partials(store)[0]["completed"] > 0
