"""The served OpenAPI document: complete, and a base for random requests that must never break the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import Live
from tests.server.model_store import live_store, own_home, store_model
from tests.support.tiny import tiny_gguf


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("home")
    with own_home(folder) as store:
        store_model(store, "tiny", tiny_gguf(folder / "tiny.gguf", context_length=64))
        with live_store(store) as running:
            yield running


def test_every_api_route_is_in_the_document(server: Live) -> None:
    document = server.client.get("/openapi.json").json()
    served = {route.path.replace(":path", "") for route in server.app.routes}
    assert {path for path in served if path.startswith(("/api", "/v1"))} <= set(document["paths"])
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "tools", "response_format", "stream_options"} <= set(chat["properties"])


@pytest.mark.slow
def test_random_requests_find_no_error_of_the_server(server: Live) -> None:
    """Run with `-m slow`; needs the `schemathesis` package."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    names = {"model": "tiny", "name": "tiny"}

    def check(case: Any) -> None:
        # Half the cases keep a name that exists, or nothing behind the look-up would ever run.
        if isinstance(case.body, dict) and len(repr(case.body)) % 2:
            case.body.update({key: value for key, value in names.items() if key in case.body})
        reply = case.call()
        told = (case.method, case.path, case.body, reply.text)
        allowed = 501 if case.path == "/api/push" else 503
        assert reply.status_code < 500 or reply.status_code == allowed, told
        assert reply.status_code != 503 or reply.headers.get("Retry-After"), told
        assert "Traceback" not in reply.text

    for found in schema.get_all_operations():
        operation = found.ok()
        few = settings(
            max_examples=60,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        few(given(case=operation.as_strategy())(check))()
    assert server.client.get("/health").status_code == 200
