"""Memory of blocks is taken before the step that needs it."""

from __future__ import annotations

from math import inf

from edgellm.config import EngineConfig, SamplingParams
from edgellm.engine.ahead import BlocksAhead
from edgellm.engine.block_pool import BlockPool
from edgellm.engine.engine import Engine
from tests.support.scripted import ByteTokenizer, ScriptedRunner, hash_script, model_config


def made(windows: tuple[int, ...]) -> tuple[Engine, ScriptedRunner]:
    config = model_config(windows=windows)
    runner = ScriptedRunner(hash_script, config)
    return Engine(EngineConfig(ctx=2048), config, runner, ByteTokenizer(), [200] * len(config.cache_groups)), runner


def test_answers_that_grow_together_find_their_next_blocks_ready() -> None:
    engine, runner = made((0,))
    for i in range(4):
        engine.add_request([i + 1] * 40, SamplingParams(max_tokens=200, ignore_eos=True))
    late = []
    for n in range(100):
        before, ready = set(runner.rows[0]), {block for _, block in runner.touched}
        engine.step()
        if n > 1:
            late += sorted(set(runner.rows[0]) - before - ready - {b for _, b in runner.touched[-1:]})
    assert len(runner.rows[0]) >= 4 * 4  # 140 tokens each: four of them more than once came to a new block together
    assert not late
    assert max(block for _, block in runner.touched) <= len(runner.rows[0]) + 4  # and no more than may be needed
    assert len(set(runner.touched)) == len(runner.touched)


def test_windows_use_their_blocks_again_and_take_none_ahead() -> None:
    engine, runner = made((0, 64))
    engine.add_request([1] * 40, SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(100):
        engine.step()
    kinds = [group.window for group in engine.model_config.cache_groups]
    assert runner.touched and all(not kinds[group] for group, _ in runner.touched)


def test_no_more_blocks_than_there_are() -> None:
    config = model_config(windows=(0,))
    runner = ScriptedRunner(hash_script, config)
    engine = Engine(EngineConfig(ctx=128), config, runner, ByteTokenizer(), [4])
    engine.add_request([1] * 40, SamplingParams(max_tokens=80, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert {block for _, block in runner.touched} <= {1, 2, 3, 4}


def test_steps_without_time_touch_only_what_is_needed_soon() -> None:
    pool, touched = BlockPool(50), list[int]()
    ahead = BlocksAhead({0: pool}, lambda group, block: touched.append(block))
    ahead.advance(6, inf)
    for _ in range(9):
        ahead.advance(6, seconds=0.0)
    assert touched == [1, 2, 3]
    pool.allocate(2)
    ahead.advance(6, seconds=0.0)
    ahead.advance(6, seconds=0.0)
    assert touched == [1, 2, 3, 4, 5]
    for _ in range(9):
        ahead.advance(6, inf)
    assert touched == [1, 2, 3, 4, 5, 6, 7, 8]
