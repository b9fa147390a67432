"""The chat page in headless Chromium. Run with `-m slow`; needs the `playwright` package and a chromium program
(`apt-get install chromium`, or EDGELLM_CHROMIUM naming one)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.live import Live, live_scripted
from tests.support.scripted import EOS

pytestmark = pytest.mark.slow

ANSWER = """# Title

Some **bold** and `code` and <b>no markup</b> <img src=x onerror="document.title='owned'">

- one
- two

```
if a < b: pass
```

[safe](https://example.org/a) [unsafe](javascript:alert(1))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    program = os.environ.get("EDGELLM_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium here")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def answers(tokens: Any) -> int:
    """The answer after the first message; to `again`, how many assistant turns the prompt holds."""
    text = bytes(t for t in tokens if t < 256).decode("utf-8", "replace")
    prompt, _, said = text.rpartition("assistant: ")
    while not prompt.endswith("\n"):
        prompt, _, more = prompt.rpartition("assistant: ")
        said = f"{more}assistant: {said}"
    answer = ANSWER if "again" not in prompt else f"turns: {prompt.count('assistant: ')}"
    data = answer.encode()
    return data[len(said.encode())] if len(said.encode()) < len(data) else EOS


@pytest.fixture
def server() -> Iterator[Live]:
    with live_scripted(answers, llm={"ctx": 4096, "delay": 0.003}) as running:
        yield running


def until(page: Any, true: Callable[[], bool]) -> None:
    """Waits from outside: the page's own policy forbids what `wait_for_function` does."""
    for _ in range(1000):
        if true():
            return
        page.wait_for_timeout(20)
    raise AssertionError("it did not come true in time")


def test_a_chat_with_markdown_figures_and_history(browser: Any, server: Live) -> None:
    page = browser.new_page()
    foreign: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(server.url) else foreign.append(request.url))
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(f"{server.url}/ui")
    until(page, lambda: page.locator("#model option").count() == 1)
    assert page.locator("#prompt").evaluate("node => node === document.activeElement")
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant .figures", timeout=20_000)
    answer = page.locator("article.assistant").first
    assert answer.locator("h2").inner_text() == "Title"
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    assert answer.locator("pre").inner_text() == "if a < b: pass"
    assert answer.locator("img, b").count() == 0 and page.title() == "edgellm"
    assert answer.locator("a").evaluate_all("nodes => nodes.map(n => n.href)") == ["https://example.org/a"]
    figures = answer.locator(".figures").inner_text()
    assert "tokens/s" in figures and "cached" in figures
    page.keyboard.type("again")
    page.keyboard.press("Enter")
    until(page, lambda: page.locator("article .figures").count() == 2)
    assert "turns: 1" in page.locator("article.assistant").nth(1).inner_text()
    assert (foreign, problems) == ([], [])


def test_stop_ends_the_answer_in_the_engine_too(browser: Any) -> None:
    endless = {"ctx": 4096, "delay": 0.03}
    with live_scripted(lambda tokens: ord("x"), llm=endless) as server:
        page = browser.new_page()
        page.goto(f"{server.url}/ui/")
        until(page, lambda: page.locator("#model option").count() == 1)
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        until(page, lambda: "xxx" in "".join(page.locator("article.assistant").all_inner_texts()))
        page.keyboard.press("Escape")
        until(page, lambda: page.locator("article.assistant .figures").all_inner_texts() == ["stopped"])
        page.wait_for_timeout(200)
        assert server.llm().stats()["running"] == 0
        assert page.locator("#stop").is_hidden() and page.locator("#send").is_visible()


def test_the_page_fits_a_phone_and_works_by_keyboard(browser: Any, server: Live) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 640})
    page.goto(f"{server.url}/ui/")
    until(page, lambda: page.locator("#model option").count() == 1)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert {"model", "clear", "send"} <= set(reached)


def test_a_key_is_asked_for(browser: Any) -> None:
    with live_scripted("Hello", api_key="s3cret") as server:
        page = browser.new_page()
        page.on("dialog", lambda dialog: dialog.accept("s3cret"))
        page.goto(f"{server.url}/ui/")
        until(page, lambda: page.locator("#model option").count() == 1)


def test_errors_are_told(browser: Any) -> None:
    with live_scripted(lambda tokens: ValueError("it broke")) as server:
        page = browser.new_page()
        page.goto(f"{server.url}/ui/")
        until(page, lambda: page.locator("#model option").count() == 1)
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        page.wait_for_selector("article.error")
        assert "it broke" in page.locator("article.error").inner_text()
