"""`edgellm serve`, `ps` and `stop` as programs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from edgellm.cli.main import main
from tests.support.tiny import tiny_gguf


def test_serve_ps_stop_and_a_clean_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        return code, *capsys.readouterr()

    file = tiny_gguf(tmp_path / "tiny.gguf", context_length=64)
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "none"))
    command = [sys.executable, "-m", "edgellm", "serve", str(file), "--port", "0", "--backend", "reference"]
    with subprocess.Popen([*command, "--api-key", "k3y"], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert address, line
        port = address[1]
        while "loaded model=tiny" not in line:
            line = server.stderr.readline()
            assert line, "the server ended"
        code, _, said = run("serve", "--port", port)
        assert code == 1 and f"port {port}" in said and "in use" in said
        code, _, said = run("ps", "--port", port)
        assert code == 1 and "key" in said
        monkeypatch.setenv("EDGELLM_API_KEY", "k3y")
        monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{port}")
        (model,) = json.loads(run("ps", "--json")[1])["models"]
        assert model["name"] == "tiny:latest" and model["context_length"] == 64
        assert "tiny:latest" in run("ps")[1]
        assert run("stop", "tiny")[0] == 0
        assert json.loads(run("ps", "--json")[1]) == {"models": []}
        code, _, said = run("stop", "nope")
        assert code == 1 and "nope" in said
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    code, _, said = run("ps")
    assert code == 1 and "edgellm serve" in said


def test_a_model_that_does_not_fit_ends_the_server_in_one_line(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "tiny.gguf", context_length=64)
    command = [sys.executable, "-m", "edgellm", "serve", str(file), "--port", "0", "--memory", "1000"]
    done = subprocess.run([*command, "--backend", "reference"], capture_output=True, text=True, timeout=60)
    serving, said = done.stderr.splitlines()
    assert done.returncode == 1 and serving.startswith("edgellm: serving on http://127.0.0.1:")
    assert said.startswith("edgellm: tiny:latest needs ") and "the memory budget is 1000" in said


def test_an_empty_api_key_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """`--api-key "$UNSET"` must not open the server to everybody."""
    assert main(["serve", "--port", "0", "--api-key", ""]) == 2
    assert "--api-key: it is empty" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["[::1]", "::1", "http://[::1]:80/x"])
def test_an_address_of_ipv6_is_shown_as_browsers_take_it(host: str, tmp_path: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    env = {**os.environ, "EDGELLM_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "edgellm", "serve", "--host", host, "--port", "0"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        if "can't listen" in line:
            pytest.skip("this machine has no address ::1")
        address = re.search(r"http://\[::1\]:(\d+)", line)
        assert address, line
        assert main(["ps", "--host", host, "--port", address[1]]) == 0
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0


def test_other_origins_than_the_pages_own_are_refused_by_default(tmp_path: Path) -> None:
    """The whole program once, not the application alone: settings reach the guard."""
    env = {**os.environ, "EDGELLM_HOME": str(tmp_path), "OLLAMA_ORIGINS": "https://good.example"}
    command = [sys.executable, "-m", "edgellm", "serve", "--port", "0"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        address = re.search(r"http://[\d.:]+", server.stderr.readline())
        assert address
        with httpx.Client(base_url=address[0], trust_env=False, transport=httpx.HTTPTransport(retries=5)) as client:
            for origin, status in (("https://good.example", 200), ("https://evil.example", 403)):
                assert client.get("/api/version", headers={"Origin": origin}).status_code == status
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
