"""Durations, options and environment variables."""

from __future__ import annotations

import math
from datetime import datetime

import pytest

from edgellm.errors import RequestError
from edgellm.server.body import parse
from edgellm.server.durations import keep_alive_seconds, local_stamp, parse_duration, utc_stamp
from edgellm.server.messages import join_text
from edgellm.server.openai_wire import ChatBody
from edgellm.server.options import parse_options
from edgellm.server.settings import ServerSettings, parse_host


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300ms", 0.3), ("1.5h", 5400), ("2h45m", 9900), ("-1m", -60), ("0", 0), ("1h30m", 5400), ("10us", 1e-5)],
)
def test_durations_read_as_go_reads_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["10", "abc", "", "-", "5 m", "1d", "m5", "1h30", "１s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((forever, math.inf) for forever in (-1, "-1", "-1m", 10**400)),
        *((unset, None) for unset in (None, "")),
        *(((0, 0), ("0", 0), (300, 300), (1.5, 1.5), ("5m", 300), ("1h30m", 5400), ("300ms", 0.3))),
    ],
)
def test_b20_keep_alive_formats(value: object, seconds: float | None) -> None:
    assert keep_alive_seconds(value) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("value", ["abc", True, "10", [5], {}])
def test_b20_keep_alive_refusals_name_the_field(value: object) -> None:
    with pytest.raises(RequestError, match="keep_alive"):
        keep_alive_seconds(value)


def test_the_environment_may_give_keep_alive_in_bare_seconds() -> None:
    assert ServerSettings.from_env({"OLLAMA_KEEP_ALIVE": "90"}).keep_alive == 90
    assert ServerSettings.from_env({"OLLAMA_KEEP_ALIVE": "-1"}).keep_alive == math.inf


def test_stamps_are_rfc_3339() -> None:
    assert utc_stamp(0.25) == "1970-01-01T00:00:00.250000Z"
    far = datetime.fromisoformat(local_stamp(math.inf))
    assert far.tzinfo is not None and far.year > 2300


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("0.0.0.0", "0.0.0.0", 11434),
        ("example.org:8080", "example.org", 8080),
        ("http://example.org", "example.org", 80),
        ("https://example.org/path", "example.org", 443),
        ("[::1]:1234", "::1", 1234),
        ("::1", "::1", 11434),
        (":5000", "127.0.0.1", 5000),
        ("localhost:99999999", "localhost", 11434),
    ],
)
def test_hosts(text: str, host: str, port: int) -> None:
    assert parse_host(text) == (host, port)


def test_what_is_no_address_is_named() -> None:
    with pytest.raises(RequestError, match="is no address"):
        ServerSettings.from_env({"OLLAMA_HOST": "[::1"})


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        (None, None, ("10.0.0.1", 5000)),
        (None, 0, ("10.0.0.1", 0)),
        ("localhost", None, ("localhost", 5000)),
        ("localhost:1", None, ("localhost", 1)),
        ("localhost:1", 2, ("localhost", 2)),
        ("", None, ("127.0.0.1", 5000)),
    ],
)
def test_an_address_given_by_hand(host: str | None, port: int | None, expected: tuple[str, int]) -> None:
    settings = ServerSettings(host="10.0.0.1", port=5000).at(host, port)
    assert (settings.host, settings.port) == expected


def test_own_variables_go_before_ollamas() -> None:
    env = {"EDGELLM_HOST": ' "127.0.0.1:1" ', "OLLAMA_HOST": "127.0.0.1:2", "OLLAMA_CONTEXT_LENGTH": "2048"}
    settings = ServerSettings.from_env({**env, "OLLAMA_ORIGINS": "https://a.example, chrome-extension://*"})
    assert (settings.port, settings.ctx) == (1, 2048)
    assert settings.origins == ("https://a.example", "chrome-extension://*")


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(RequestError, match="OLLAMA_MAX_QUEUE=many"):
        ServerSettings.from_env({"OLLAMA_MAX_QUEUE": "many"})


def test_options_become_sampling_fields() -> None:
    given = {"num_predict": 5, "top_k": 3.0, "stop": ["a", ""], "seed": -1, "num_ctx": 64, "temperature": None}
    options = parse_options({**given, "mirostat": 0, "num_gpu": 99, "n_ctx": 7})
    assert options.num_ctx == 64
    assert options.sampling == {"max_tokens": 5, "top_k": 3, "stop": ("a",), "seed": None, "mirostat": 0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_predict", value) for value in (-3, "5", True, [1])),
        *(("num_ctx", value) for value in (-5, "4096")),
        *(("temperature", value) for value in (-1, "0.5", 10**400)),
        *(("stop", value) for value in ("a", [1])),
        ("top_p", 1.5),
        ("repeat_penalty", 0),
        ("repeat_last_n", -2),
        ("mirostat", 3),
    ],
)
def test_b27_wrong_options_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f'"{name}"'):
        parse_options({name: value})


def test_b27_unknown_options_are_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_options({"n_ctx": 5}).sampling == {}
    assert "n_ctx" in caplog.text


@pytest.mark.parametrize(
    "body, words",
    [
        ({"stop": ["a", 5]}, "stop.1: Input should be a valid string"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be a valid string"),
        (
            {"messages": [{"role": "user", "content": ["x"]}]},
            "messages.0.content.0: Input should be a valid dictionary",
        ),
    ],
)
def test_a_wrong_field_is_named_as_the_client_wrote_it(body: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(ChatBody, {"model": "m", "messages": [], **body})
    assert str(caught.value) == words


def test_a_part_without_its_text_says_what_is_missing() -> None:
    with pytest.raises(RequestError, match="needs a string in 'text'"):
        join_text([{"type": "text"}], "m", "messages.0")
