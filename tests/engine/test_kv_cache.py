"""Block tables under random use, prefix hits, and what sliding windows hold."""

from __future__ import annotations

import random

import pytest

from edgellm.engine.block_pool import NULL_BLOCK, BlockPool
from edgellm.engine.kv_cache import KVCache, make_kind
from edgellm.engine.request import Request, Status
from edgellm.models.config import CacheGroup

BLOCK = 4
FULL, WINDOW = CacheGroup("full", (0,)), CacheGroup("window", (1,), window=6)


def cache(*groups: CacheGroup, blocks: int = 40, sharing: bool = True) -> KVCache:
    kinds = [make_kind(group, BLOCK) for group in groups]
    return KVCache(kinds, [blocks] * len(groups), BLOCK, lambda group, source, target: None, sharing)


def run(kv: KVCache, request: Request, chunk: int = 100) -> None:
    """Compute all known tokens."""
    while request.num_uncomputed_tokens:
        n = min(chunk, request.num_uncomputed_tokens)
        assert kv.allocate(request, request.num_computed_tokens + n)
        request.num_computed_tokens += n
        kv.advance(request)


def started(kv: KVCache, number: int, tokens: list[int], chunk: int = 100) -> Request:
    request = Request(number, list(tokens), 10)
    assert kv.admit(request, 0)
    run(kv, request, chunk)
    return request


def held(request: Request, group: int) -> list[int]:
    return [b for b in request.block_tables[group] if b != NULL_BLOCK]


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW)])
def test_random_walk(groups: tuple[CacheGroup, ...]) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    kv = cache(*groups, blocks=20)
    running: list[Request] = []
    for number in range(10_000):
        action = rng.choice("aagggdfp")
        request = rng.choice(running) if running else None
        if action == "a" and len(running) < 6:
            # Few different beginnings, so that prefixes are shared, diverge inside a block and are hit whole.
            new = Request(number, [rng.randrange(2)] * rng.randrange(1, 30) + [rng.randrange(3)] * rng.randrange(6), 9)
            if kv.admit(new, rng.randrange(3)):
                new.status = Status.RUNNING
                running.append(new)
        elif action == "g" and request:
            n = rng.randint(1, request.num_uncomputed_tokens)
            if kv.allocate(request, request.num_computed_tokens + n):
                request.num_computed_tokens += n
                if not request.num_uncomputed_tokens:
                    request.token_ids.append(rng.randrange(3))
                kv.advance(request)
        elif action == "d" and request:
            drafts = rng.randrange(1, 9)
            if kv.allocate(request, request.num_tokens + drafts):
                request.num_computed_tokens = request.num_tokens
                request.token_ids += [rng.randrange(3) for _ in range(rng.randint(1, drafts))]
                request.num_computed_tokens = request.num_tokens - 1
                kv.advance(request)
                kv.roll_back(request)
        elif action in "fp" and request:
            running.remove(request)
            kv.free(request)
        kv.check_integrity(running)
    for request in running:
        kv.free(request)
    kv.check_integrity([])
    assert all(pool.num_free == 20 for pool in kv.pools)


def test_a_prefix_is_found_by_content_and_shared() -> None:
    kv = cache(FULL)
    first = started(kv, 0, list(range(10)))
    second = Request(1, [*range(8), 77, 78, 79], 5)
    assert kv.admit(second, 0)
    assert second.num_computed_tokens == second.num_cached_tokens == 8
    assert second.block_tables[0] == first.block_tables[0][:2]
    kv.check_integrity([first, second])


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token_in_its_own_block() -> None:
    copies: list[tuple[int, int, int]] = []
    kv = KVCache([make_kind(FULL, BLOCK)], [20], BLOCK, lambda *blocks: copies.append(blocks))
    first = started(kv, 0, list(range(8)))
    second = Request(1, list(range(8)), 5)
    assert kv.admit(second, 0)
    assert (second.num_computed_tokens, second.num_cached_tokens) == (7, 7)
    run(kv, second)
    assert copies == [(0, first.block_tables[0][1], second.block_tables[0][1])]
    assert first.block_tables[0][0] == second.block_tables[0][0]
    kv.check_integrity([first, second])


def test_equal_digests_are_not_trusted() -> None:
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    pool.register(block, b"digest", b"parent", [1, 2, 3, 4])
    assert pool.lookup(b"digest", [1, 2, 3, 4]) == block
    assert pool.lookup(b"digest", [1, 2, 3, 5]) is None


def test_eviction_takes_the_oldest_and_the_ends_of_prefixes_first() -> None:
    kv = cache(FULL, blocks=7)
    old, new = started(kv, 0, [1] * 12), started(kv, 1, [2] * 12)
    for request in (old, new):
        kv.free(request)
    third = started(kv, 2, [3] * 12)  # three blocks: the unused one and the last two of the oldest
    kv.free(third)
    hit_old, hit_new = Request(3, [1] * 12, 1), Request(4, [2] * 12, 1)
    assert kv.admit(hit_old, 0) and kv.admit(hit_new, 0)
    assert (hit_old.num_cached_tokens, hit_new.num_cached_tokens) == (4, 11)
    assert hit_old.cache_miss is not None and "evicted" in hit_old.cache_miss
    assert hit_new.cache_miss is None


def test_the_reason_of_a_miss() -> None:
    kv = cache(FULL)
    first = started(kv, 0, list(range(16)))
    kv.free(first)
    cases = [
        ([*range(6), 99, 98, 97], 4, "differs from what is cached after token 6"),
        ([50, 51, 52, 53, 54], 0, None),
        ([*range(16), 70, 71], 16, None),
    ]
    for tokens, cached, reason in cases:
        request = Request(1, tokens, 1)
        assert kv.admit(request, 0)
        assert request.num_cached_tokens == cached
        assert (reason is None) == (request.cache_miss is None) and (reason or "") in (request.cache_miss or "")
        kv.free(request)
    other = Request(2, list(range(16)), 1, rope_variant=1)
    assert kv.admit(other, 0)
    assert other.num_cached_tokens == 0 and "rotary" in (other.cache_miss or "")


def test_blocks_behind_the_window_are_given_back() -> None:
    kv = cache(FULL, WINDOW)
    request = started(kv, 0, list(range(100)), chunk=4)
    assert len(held(request, 0)) == 25
    # Token 100 reads 95..99; block 23 holds 92..95, and one more is kept for a hit at the end of a full block.
    assert request.block_tables[1][:23] == [NULL_BLOCK] * 23
    assert len(held(request, 1)) == 2
    # What was passed is used again at once: never more than window + chunk was touched.
    assert max(held(request, 1)) <= 4
    kv.check_integrity([request])


def test_windows_follow_verified_tokens_only() -> None:
    kv = cache(FULL, WINDOW)
    request = started(kv, 0, list(range(20)))
    before = held(request, 1)
    request.draft_ids = [1] * 8
    assert kv.allocate(request, 20 + 8)
    kv.advance(request)
    assert held(request, 1)[: len(before)] == before
    kv.roll_back(request)
    assert held(request, 1) == before
    kv.check_integrity([request])


def test_windowed_prefix_hits_only_where_rows_are_held() -> None:
    kv = cache(FULL, WINDOW)
    first = started(kv, 0, list(range(40)), chunk=4)
    kv.free(first)
    continued = Request(1, [*range(40), 41, 42], 1)
    assert kv.admit(continued, 0)
    assert (continued.num_cached_tokens, continued.cache_miss) == (40, None)
    run(kv, continued, 4)
    kv.free(continued)

    # Divergence at 20: the full layers have it, the windowed rows before it are gone.
    early = Request(2, [*range(20), 99, 98, 97], 1)
    assert kv.admit(early, 0)
    assert early.num_cached_tokens == 0
    assert (
        early.cache_miss is not None and "windowed layers no longer hold the rows before token 20" in early.cache_miss
    )
    run(kv, early, 4)
    early.token_ids += range(200, 240)
    run(kv, early, 4)
    kv.check_integrity([early])
    # That prefix was asked for once, so this time its rows were kept.
    again = Request(3, [*range(20), 77, 78], 1)
    assert kv.admit(again, 0)
    assert (again.num_cached_tokens, again.cache_miss) == (20, None)
    kv.check_integrity([early, again])


def test_what_a_refused_request_missed_is_not_looked_for() -> None:
    """That takes longer than the match itself, and it is refused in every step until there is room."""
    kv = cache(FULL, WINDOW)
    kv.free(started(kv, 0, list(range(40)), chunk=4))
    early = Request(1, [*range(20), 99, 98, 97], 1)
    assert not kv.admit(early, headroom=40)
    assert early.wanted_blocks == 0
    assert kv.admit(early, headroom=0)
    assert early.wanted_blocks == 5 and early.cache_miss


def test_admission_leaves_the_pool_as_it_was_when_it_refuses() -> None:
    kv = cache(FULL, blocks=5)
    first = started(kv, 0, list(range(8)))
    kv.free(first)
    big = Request(1, [*range(8), *range(50, 70)], 1)
    assert not kv.admit(big, 0)
    assert big.block_tables == []
    kv.check_integrity([])


def test_nothing_is_shared_when_sharing_is_off() -> None:
    kv = cache(FULL, sharing=False)
    started(kv, 0, list(range(8)))
    second = Request(1, list(range(8)), 1)
    assert kv.admit(second, 0)
    assert second.num_cached_tokens == 0
