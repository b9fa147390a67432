"""Cases B20, B26 and B27 over HTTP: keep_alive, prompts larger than the context, extreme num_predict and num_ctx."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any

import pytest

from edgellm.server.catalog import ModelDetails, ModelRecord
from edgellm.server.manager import LoadedModel
from edgellm.server.metrics import engine_stats, measured_bytes
from tests.server.live import GivenCatalog, Live, fake_record, live, live_scripted
from tests.support.scripted import PlainTemplate, say, scripted_llm

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """A model that never ends by itself, with a context of 512."""
    with live_scripted(say("xy", end=False), llm={"ctx": 512}) as running:
        yield running


def chat(server: Live, messages: list[dict[str, str]], **body: Any) -> Any:
    return server.client.post("/api/chat", json={"model": "fake", "messages": messages, "stream": False, **body})


def n_tokens(messages: list[dict[str, str]]) -> int:
    return len(PlainTemplate().encode(messages))


def expires_in(server: Live) -> float:
    (model,) = server.client.get("/api/ps").json()["models"]
    return (datetime.fromisoformat(model["expires_at"]) - datetime.now(timezone.utc)).total_seconds()


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        (300, 300),
        ("5m", 300),
        ("1h30m", 5400),
        (None, 300),
        ("", 300),
    ],
)
def test_b20_ps_tells_what_keep_alive_asked_for(server: Live, path: str, value: Any, seconds: float) -> None:
    assert server.client.post(path, json={"model": "fake", "keep_alive": value}).json()["done_reason"] == "load"
    left = expires_in(server)
    assert left > 1e9 if math.isinf(seconds) else left == pytest.approx(seconds, abs=5)


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
@pytest.mark.parametrize("value", ["abc", True, "10", {}])
def test_b20_what_is_no_duration_is_400(server: Live, path: str, value: Any) -> None:
    reply = server.client.post(path, json={"model": "fake", "keep_alive": value, "messages": HI, "prompt": "Hi"})
    assert reply.status_code == 400 and "keep_alive" in reply.json()["error"]


def test_b20_a_long_answer_outlasts_a_short_keep_alive() -> None:
    with live_scripted("a long answer", llm={"delay": 0.05}) as server:
        reply = chat(server, HI, keep_alive="200ms")
        assert reply.json()["message"]["content"] == "a long answer"
        assert server.client.get("/api/ps").json()["models"], "unloaded at the end of its request"


def test_b20_a_model_that_is_let_go_while_it_is_asked_about_is_left_out() -> None:
    class Emptying(GivenCatalog):
        """Everything is unloaded when /api/ps, which has listed what is loaded, looks a model up."""

        def details(self, record: ModelRecord) -> ModelDetails:
            manager, loop = running.state.manager, running.state.bridge._loop
            for model in manager.loaded():
                asyncio.run_coroutine_threadsafe(manager.unload(model.record.name), loop).result(10)
            return super().details(record)

    catalog = Emptying({name: fake_record(name) for name in ("a:latest", "b:latest")})
    with live(catalog, lambda *_: (scripted_llm("Hello"), 1000)) as running:
        for name in catalog.records:
            assert chat(running, HI, model=name).status_code == 200
        reply = running.client.get("/api/ps")
    assert (reply.status_code, reply.json()) == (200, {"models": []})


def test_b20_the_figures_of_a_model_that_was_let_go() -> None:
    model = LoadedModel(fake_record(), scripted_llm("Hello"), 1000, 0.0, 0.0)
    model.close()
    assert engine_stats(model) == {} and measured_bytes(model) == 1234


SYSTEM = {"role": "system", "content": "Say PINEAPPLE."}
TURNS = [
    {"role": role, "content": f"{role} says {number} things in so many words"}
    for number in range(10)
    for role in ("user", "assistant")
]
LAST = {"role": "user", "content": "And now?"}


def test_b26_a_chat_that_is_too_long_loses_whole_oldest_turns_and_says_so(server: Live) -> None:
    whole = [SYSTEM, *TURNS, LAST]
    reply = chat(server, whole, options={"num_ctx": 256, "num_predict": 1}).json()
    dropped = reply["truncated"]["messages"]
    assert dropped % 2 == 0 and 0 < dropped < len(TURNS)
    kept = [SYSTEM, *TURNS[dropped:], LAST]
    assert reply["prompt_eval_count"] == n_tokens(kept) < 256
    assert reply["truncated"]["tokens"] == n_tokens(whole) - n_tokens(kept)
    more = [SYSTEM, *TURNS[dropped - 2 :], LAST]
    assert n_tokens(more) > 256 - 256 // 8, "more was dropped than had to be"


def test_b26_what_fits_is_not_touched(server: Live) -> None:
    reply = chat(server, [SYSTEM, LAST], options={"num_predict": 1}).json()
    assert "truncated" not in reply and reply["prompt_eval_count"] == n_tokens([SYSTEM, LAST])


def test_b26_system_and_last_turn_alone_too_long_is_400_with_both_numbers(server: Live) -> None:
    long = [SYSTEM, *TURNS, {"role": "user", "content": "y" * 400}]
    reply = chat(server, long, options={"num_ctx": 128})
    expected = str(n_tokens([SYSTEM, long[-1]]))
    assert reply.status_code == 400
    assert expected in reply.json()["error"] and "128" in reply.json()["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [SYSTEM, *TURNS, LAST], "truncate": False, "options": {"num_ctx": 128}}),
        ("/api/generate", {"prompt": "y" * 400, "options": {"num_ctx": 128}}),
        ("/api/generate", {"prompt": "y" * 400, "raw": True, "options": {"num_ctx": 128}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "y" * 600}]}),
        ("/v1/completions", {"prompt": "y" * 600}),
        ("/v1/responses", {"input": "y" * 600}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "y" * 600}], "max_tokens": 5}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_b26_elsewhere_too_long_is_400_with_both_numbers(
    server: Live, path: str, body: dict[str, Any], stream: bool
) -> None:
    reply = server.client.post(path, json={"model": "fake", "stream": stream, **body})
    assert reply.status_code == 400
    limit = "128" if "options" in body else "512"
    assert limit in reply.text and "tokens" in reply.text
    if path.startswith("/v1/") and path != "/v1/messages":
        assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_b26_a_prompt_one_short_of_the_context_gives_one_token(server: Live) -> None:
    body = {"model": "fake", "prompt": "y" * 127, "raw": True, "stream": False, "options": {"num_ctx": 128}}
    reply = server.client.post("/api/generate", json=body).json()
    assert (reply["eval_count"], reply["done_reason"]) == (1, "length")
    reply = server.client.post("/api/generate", json={**body, "prompt": "y" * 128})
    assert reply.status_code == 400


@pytest.mark.parametrize(
    ("num_predict", "count"), [(0, 0), (1, 1), (-1, None), (-2, None), (10**12, None), (2.5, 2), (None, None)]
)
def test_b27_every_num_predict_is_finite(server: Live, num_predict: Any, count: int | None) -> None:
    reply = chat(server, HI, options={"num_predict": num_predict})
    final = reply.json()
    whole = 512 - n_tokens(HI)
    assert final["done_reason"] == "length"
    assert final.get("eval_count", 0) == (whole if count is None else count)
    assert chat(server, HI, options={"num_predict": 1}).status_code == 200, "the next request does not work"


def test_b27_minus_two_goes_on_past_the_end_token() -> None:
    with live_scripted("xy", llm={"ctx": 64}) as server:
        assert chat(server, HI).json()["message"]["content"] == "xy"
        final = chat(server, HI, options={"num_predict": -2}).json()
        assert (final["done_reason"], final["eval_count"]) == ("length", 64 - n_tokens(HI))


@pytest.mark.parametrize(("num_ctx", "limit"), [(0, 512), (2**31, 512), (2**63, 512), (64, 64), (10**30, 512)])
def test_b27_num_ctx_is_clamped_to_what_the_model_holds(server: Live, num_ctx: int, limit: int) -> None:
    final = chat(server, HI, options={"num_ctx": num_ctx}).json()
    assert final["prompt_eval_count"] + final["eval_count"] == limit


@pytest.mark.parametrize("num_ctx", [1, 2, 8])
def test_b27_a_context_too_small_for_anything_is_400(server: Live, num_ctx: int) -> None:
    reply = chat(server, HI, options={"num_ctx": num_ctx})
    assert reply.status_code == 400 and str(num_ctx) in reply.json()["error"]


@pytest.mark.parametrize(
    "options", [{"num_predict": -3}, {"num_predict": "5"}, {"num_ctx": -5}, {"num_ctx": "4096"}, {"num_ctx": True}]
)
def test_b27_wrong_values_are_400_and_name_the_option(server: Live, options: dict[str, Any]) -> None:
    reply = chat(server, HI, options=options)
    assert reply.status_code == 400 and next(iter(options)) in reply.json()["error"]


def test_b27_unknown_options_are_no_error(server: Live) -> None:
    assert chat(server, HI, options={"n_ctx": 5, "num_gpu": 3, "num_predict": 1}).status_code == 200


def test_stored_options_system_and_messages_are_the_models_own() -> None:
    record = fake_record(
        system="Be brief.", params={"num_predict": 2, "stop": ["z"]}, messages=({"role": "user", "content": "Yo"},)
    )
    with live_scripted("xyz", record=record) as server:
        stored = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Yo"}]
        reply = chat(server, HI).json()
        assert reply["prompt_eval_count"] == n_tokens([*stored, *HI])
        assert reply["message"]["content"] == "xy"
        assert chat(server, HI, options={"num_predict": 5}).json()["message"]["content"] == "xy"
        own = {"role": "system", "content": "No."}
        assert chat(server, [own, *HI]).json()["prompt_eval_count"] == n_tokens([own, stored[1], *HI])


def test_a_full_queue_is_503_and_says_when_to_come_back() -> None:
    llm = {"max_seqs": 1, "max_waiting": 1, "delay": 0.02}
    with live_scripted(say("xy", end=False), llm=llm) as server:
        server.client.post("/api/generate", json={"model": "fake"})
        with ThreadPoolExecutor(6) as pool:
            limit = {"num_predict": 20}
            replies = list(pool.map(lambda _: chat(server, HI, options=limit), range(6)))
        full = [reply for reply in replies if reply.status_code != 200]
        assert 1 <= len(full) <= 4
        for reply in full:
            assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
            text = "server busy, please try again.  maximum pending requests exceeded"
            assert reply.json() == {"error": text}


@pytest.mark.parametrize("stop", [["x"] * 65, ["y" * 9000]])
def test_stop_strings_are_bounded(server: Live, stop: list[str]) -> None:
    reply = chat(server, HI, options={"stop": stop})
    assert reply.status_code == 400 and "stop" in reply.json()["error"]


@pytest.mark.parametrize(
    "options", [{"top_k": 10**30}, {"seed": 10**30}, {"seed": -5}, {"repeat_last_n": 10**30}, {"top_k": -(10**30)}]
)
def test_numbers_of_any_size_are_no_error_of_the_server(server: Live, options: dict[str, int]) -> None:
    assert chat(server, HI, options={**options, "num_predict": 2, "repeat_penalty": 1.1}).status_code in (200, 400)
