"""The prefix cache on disk: used again as it was, and left alone when it is not what it should be."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM, SamplingParams
from edgellm.engine.prompt_cache import PromptCache, check_path
from edgellm.errors import RequestError
from tests.engine.test_engine import WINDOWS, Driver, alone, prompts, same
from tests.support.tiny import tiny_gguf


def saved_cache(path: Path, driver: Driver, key: dict[str, Any] | None = None) -> PromptCache:
    return PromptCache(path, key or {"model": "m"}, driver.engine.kv, driver.runner)


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_saved_prompt_cache_serves_a_new_process(windows: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "folder" / "cache"
    prompt = (prompts(1, seed=4)[0] * 200)[:200]
    first = Driver(windows)
    number = first.add(prompt)
    first.finish()
    saved_cache(path, first).save()
    turn = [*prompt, *first.done[number].ids, 5, 6, 7]

    second = Driver(windows)
    cache = saved_cache(path, second)
    assert cache.load() >= 32
    second.engine.check_integrity()
    number = second.add(turn)
    second.finish()
    assert second.done[number].cached_tokens >= len(turn) - 3 - 32
    assert same(second.done[number], alone(turn, windows))

    small = Driver(windows, blocks=16)
    saved_cache(path, small).load()
    small.engine.check_integrity()
    number = small.add(turn)
    small.finish()
    assert same(small.done[number], alone(turn, windows))


def test_a_prompt_cache_never_replaces_a_file_that_is_none(tmp_path: Path) -> None:
    """Somebody's notes, or the model itself, given as --prompt-cache by mistake; a pipe would be waited for."""
    notes, pipe, long = tmp_path / "notes.txt", tmp_path / "pipe", tmp_path / ("x" * 300)
    notes.write_text("precious")
    os.mkfifo(pipe)
    wanted = {notes: "would be overwritten", pipe: "regular file", tmp_path: "regular file"}
    for path, message in {**wanted, notes / "below": "cannot be used", long: "cannot be used"}.items():
        with pytest.raises(RequestError, match=message):
            LLM("never-looked-for.gguf", prompt_cache=path)
    driver = Driver()
    driver.add([1] * 100)
    driver.finish()
    saved_cache(notes / "below", driver).save()  # fails with a line in the log, no more
    saved_cache(tmp_path / "cache", driver).save()
    (tmp_path / "empty").touch()
    for name in ("cache", "empty", "new"):
        check_path(tmp_path / name)
    assert notes.read_text() == "precious"


def test_an_unchanged_prompt_cache_is_not_written_again(tmp_path: Path) -> None:
    driver = Driver()
    driver.add([1] * 100)
    driver.finish()
    saved_cache(tmp_path / "cache", driver).save()
    before = (tmp_path / "cache").stat()
    fresh = Driver()
    cache = saved_cache(tmp_path / "cache", fresh)
    cache.load()
    cache.save()
    assert (tmp_path / "cache").stat().st_mtime_ns == before.st_mtime_ns
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


def test_rows_of_a_window_that_alone_are_new_are_saved_too(tmp_path: Path) -> None:
    """A part of a prompt that is in the file: the full layers have all of it, the windowed ones keep its end now."""
    path, prompt = tmp_path / "cache", prompts(1, seed=4)[0] * 200
    asked = [prompt[:400], [*prompt[:200], 5], [*prompt[:200], 6]]
    cached = []
    for ids in asked:
        driver = Driver((48, 0))
        cache = saved_cache(path, driver)
        cache.load()
        number = driver.add(ids, max_tokens=1)
        driver.finish()
        cache.save()
        cached.append(driver.done[number].cached_tokens)
    assert cached == [0, 0, 192]  # of 200: whole blocks of 32


def test_rows_of_another_instruction_set_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ in the last bits, and the answers with them."""
    model = tiny_gguf(tmp_path / "tiny.gguf")
    cached = []
    for isa in ("one", "one", "another"):
        monkeypatch.setattr("edgellm.backends.cpu.backend.ISA", isa)
        with LLM(model, backend="cpu", threads=1, memory=1 << 30, prompt_cache=tmp_path / "cache") as llm:
            cached.append(llm.generate([[5] * 100], SamplingParams(max_tokens=1))[0].cached_tokens)
    assert cached == [0, 96, 0]


def with_header(good: bytes, header: bytes) -> bytes:
    """The same blocks under another header, with a checksum that is right."""
    start, length = good[:23], int.from_bytes(good[23:31], "little")
    data = start + len(header).to_bytes(8, "little") + header + good[31 + length : -32]
    return data + hashlib.blake2b(data, digest_size=32).digest()


def crafted_headers(good: bytes) -> Iterator[bytes]:
    yield from (b"[]", b"[" * 100_000)
    text = good[31 : 31 + int.from_bytes(good[23:31], "little")]
    [group] = json.loads(text)["groups"]
    blocks = group["blocks"]
    (parent, ids), *more = blocks
    firsts = [7, [parent], ["xyz", ids], [parent, 7], [parent, "x" * 32], [parent, ids[1:]], [parent, ids * 2]]
    firsts += [[parent, [token, *ids[1:]]] for token in (-1, 1 << 31, 1.5, "1", None, [1])]
    listed = [more, more + blocks, *([first, *more] for first in firsts)]
    wrong = [None, {}, [], [None], [group, group], [{"blocks": blocks}], [{**group, "block_bytes": "132"}]]
    for groups in (*wrong, *([{**group, "blocks": some}] for some in listed)):
        yield json.dumps({"key": {"model": "m"}, "groups": groups}).encode()


def test_a_damaged_or_foreign_prompt_cache_is_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    driver.add([1] * 100)
    driver.finish()
    path = tmp_path / "cache"
    saved_cache(path, driver).save()
    good = path.read_bytes()
    rng = random.Random(1)
    damaged = [b"", good[:10], good[:-1], good + b"x", b"\0" * len(good), good[:23] + b"\xff" * 8 + good[31:]]
    for _ in range(30):
        at = rng.randrange(len(good))
        damaged.append(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    for data in damaged:
        path.write_bytes(data)
        fresh = Driver()
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert saved_cache(path, fresh).load() == 0
        assert len(caplog.records) == 1
        fresh.engine.check_integrity()
    for header in crafted_headers(good):
        path.write_bytes(with_header(good, header))
        fresh = Driver()
        caplog.clear()
        assert saved_cache(path, fresh).load() == 0
        assert len(caplog.records) == 1, header
        fresh.engine.check_integrity()
    path.write_bytes(good)
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        assert saved_cache(path, Driver(), {"model": "other"}).load() == 0
    assert "another model or setting" in caplog.text
    assert saved_cache(tmp_path / "absent", Driver()).load() == 0
