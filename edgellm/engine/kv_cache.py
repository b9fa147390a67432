"""Block tables of all requests over the cache groups of a model: taking, sharing, giving back. Plain ints.

A table of one windowed group while its request runs (block_size 4, window 6, 18 tokens computed):

    entry      0      1      2      3      4
    positions  0..3   4..7   8..11  12..15 16..19
    block      null   null   7      9      4        rows 10..17 may still be read, entry 2 holds row 10
               `---released---'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgellm.engine.block_pool import NULL_BLOCK, BlockPool
from edgellm.engine.request import Request, chain_digest
from edgellm.memory import MAX_CHUNK, window_blocks
from edgellm.models.config import CacheGroup

__all__ = ["CacheKind", "KVCache", "make_kind"]


class CacheKind(Protocol):
    """What one kind of layer cache can do. Scheduler, sharing and rollback ask here and assume nothing else."""

    can_roll_back: bool

    def first_entry(self, num_computed: int) -> int:
        """First table entry that tokens from position `num_computed` on still read."""

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks a request of that many tokens holds at once, at most."""


@dataclass(frozen=True)
class FullAttention:
    """One row per token, kept for good."""

    group: CacheGroup
    block_size: int
    can_roll_back = True

    def first_entry(self, num_computed: int) -> int:
        """Every row stays in use."""
        return 0

    def most_blocks(self, num_tokens: int) -> int:
        """All of them."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class WindowedAttention:
    """One row per token, of use until the window has passed it."""

    group: CacheGroup
    block_size: int
    can_roll_back = True

    def first_entry(self, num_computed: int) -> int:
        """The token at position p reads p - window + 1 .. p."""
        return max(0, num_computed - self.group.window + 1) // self.block_size

    def most_blocks(self, num_tokens: int) -> int:
        """The window and one chunk."""
        return window_blocks(self.group, num_tokens, self.block_size, MAX_CHUNK)


def make_kind(group: CacheGroup, block_size: int) -> FullAttention | WindowedAttention:
    """The cache kind of a model's cache group."""
    return (WindowedAttention if group.window else FullAttention)(group, block_size)


class KVCache:
    """One block pool and one table per request for each cache group.

    `copy_block(group, source, target)` copies a block's rows in all layers of a group (copy-on-write)."""

    def __init__(
        self,
        kinds: Sequence[CacheKind],
        num_blocks: Sequence[int],
        block_size: int,
        copy_block: Callable[[int, int, int], None],
        sharing: bool = True,
    ):
        self.kinds = tuple(kinds)
        self.pools = tuple(BlockPool(n) for n in num_blocks)
        self.block_size = block_size
        self.sharing = sharing
        self._copy_block = copy_block

    def admit(self, request: Request, headroom: int) -> bool:
        """Start a waiting request on the longest cached prefix: fills its tables and `num_computed_tokens`.

        False, and nothing changed, unless every pool could hold prompt, new token if any, `headroom` blocks more."""
        n_blocks, reach = self._match(request)
        computed = min(n_blocks * self.block_size, request.num_tokens - 1)
        tables = [self._hit_table(g, request, n_blocks, computed) for g in range(len(self.pools))]
        for kind, pool, table in zip(self.kinds, self.pools, tables, strict=True):
            held = [b for b in table if b != NULL_BLOCK]
            spare = pool.num_free - sum(pool.ref_counts[b] == 0 for b in held)
            if spare < kind.most_blocks(request.num_tokens + min(1, request.max_tokens)) - len(held) + headroom:
                return False
        for pool, table in zip(self.pools, tables, strict=True):
            for block in table:
                if block != NULL_BLOCK:
                    pool.take(block)
        request.block_tables = tables
        request.num_released = [kind.first_entry(computed) for kind in self.kinds]
        request.num_computed_tokens = computed
        request.num_registered = n_blocks
        reason = self._miss_reason(request, n_blocks, reach)  # only now: dear, and one that waits is matched every step
        if not request.num_preemptions:
            request.num_cached_tokens, request.cache_miss = computed, reason
        return True

    def readmit(self, request: Request, headroom: int) -> bool:
        """Give a swapped request blocks again for every entry it held; the caller then loads their rows."""
        needs = [sum(b != NULL_BLOCK for b in table) for table in request.block_tables]
        if any(pool.num_free < n + headroom for pool, n in zip(self.pools, needs, strict=True)):
            return False
        for g, pool in enumerate(self.pools):
            fresh = iter(pool.allocate(needs[g]))
            request.block_tables[g] = [b if b == NULL_BLOCK else next(fresh) for b in request.block_tables[g]]
        request.num_registered = 0
        return True

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Make the tables cover positions below `num_tokens`, and the block written next the request's own (copied
        if it is shared). False, and nothing changed, when a pool has not enough free blocks."""
        entry = request.num_computed_tokens // self.block_size
        shared = [
            entry < len(table) and pool.ref_counts[table[entry]] > 1
            for pool, table in zip(self.pools, request.block_tables, strict=True)
        ]
        wanted = -(-num_tokens // self.block_size)
        needs = [max(0, wanted - len(table)) for table in request.block_tables]
        if any(pool.num_free < n + copy for pool, n, copy in zip(self.pools, needs, shared, strict=True)):
            return False
        for g, (pool, table) in enumerate(zip(self.pools, request.block_tables, strict=True)):
            if shared[g]:
                [own] = pool.allocate(1)
                self._copy_block(g, table[entry], own)
                pool.release(table[entry])
                table[entry] = own
            table.extend(pool.allocate(needs[g]))
        return True

    def advance(self, request: Request) -> None:
        """After `num_computed_tokens` (verified tokens only) moved: name full blocks, give back what no window sees."""
        if self.sharing and request.share_prefix:
            self._register(request)
        # Against the last full block's end and one token less: the next turn may be admitted exactly there.
        reach = request.num_computed_tokens // self.block_size * self.block_size - 1
        for g, (kind, pool) in enumerate(zip(self.kinds, self.pools, strict=True)):
            table, first = request.block_tables[g], kind.first_entry(reach)
            for entry in range(request.num_released[g], first):
                # What others were seen to ask for stays findable; else the rows' memory is used again at once.
                asked = request.wanted_blocks
                asked_for = asked > entry >= kind.first_entry(asked * self.block_size - 1)
                keep = asked_for or entry < request.num_cached_tokens // self.block_size
                pool.release(table[entry], keep)
                table[entry] = NULL_BLOCK
            request.num_released[g] = max(request.num_released[g], first)

    def roll_back(self, request: Request) -> None:
        """Give back blocks past the known tokens, taken for drafts that were not accepted."""
        wanted = -(-request.num_tokens // self.block_size)
        for kind, pool, table in zip(self.kinds, self.pools, request.block_tables, strict=True):
            if not kind.can_roll_back and len(table) > wanted:
                raise RuntimeError("a draft was scheduled on a cache that cannot be cut back")
            while len(table) > wanted:
                pool.release(table.pop())

    def free(self, request: Request) -> None:
        """Give back all blocks; the last ones become evictable first, so that a prefix outlives what follows it."""
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            for block in reversed(table):
                if block != NULL_BLOCK:
                    pool.release(block)
        request.block_tables = []
        request.num_released = []
        request.num_computed_tokens = 0

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise RuntimeError unless pools and the tables of `requests` (all that hold blocks) agree."""
        for g, pool in enumerate(self.pools):
            pool.check_integrity(b for r in requests if r.block_tables for b in r.block_tables[g] if b != NULL_BLOCK)
        for request in requests:
            for kind, table in zip(self.kinds, request.block_tables, strict=bool(request.block_tables)):
                last = -(-request.num_computed_tokens // self.block_size)
                if NULL_BLOCK in table[kind.first_entry(request.num_computed_tokens) : last] or len(table) < last:
                    raise RuntimeError(f"request {request.request_id} has lost rows that are still read")

    def _hit_table(self, group: int, request: Request, n_blocks: int, computed: int) -> list[int]:
        first = self.kinds[group].first_entry(computed)
        found = [self._find(group, request, i) for i in range(first, n_blocks)]
        return [NULL_BLOCK] * min(first, n_blocks) + [block or NULL_BLOCK for block in found]

    def _find(self, group: int, request: Request, entry: int) -> int | None:
        tokens = request.token_ids[entry * self.block_size : (entry + 1) * self.block_size]
        return self.pools[group].lookup(request.digests[entry], tokens)

    def _match(self, request: Request) -> tuple[int, int]:
        """Full blocks of the longest prefix that all groups can go on from, and of the longest that is known."""
        if not (self.sharing and request.share_prefix):
            return 0, 0
        n = len(request.block_digests(self.block_size))
        # runs[g][k]: how many blocks without a gap end at block k. A full group needs all k, a window fewer.
        runs = [[0] * (n + 1) for _ in self.pools]
        reach = 0
        for k in range(1, n + 1):
            for g in range(len(self.pools)):
                runs[g][k] = runs[g][k - 1] + 1 if self._find(g, request, k - 1) else 0
            if any(
                run[k] < k and kind.first_entry(n * self.block_size) == 0
                for run, kind in zip(runs, self.kinds, strict=True)
            ):
                break
            reach = k
        for k in range(reach, 0, -1):
            computed = min(k * self.block_size, request.num_tokens - 1)
            if all(run[k] >= k - kind.first_entry(computed) for run, kind in zip(runs, self.kinds, strict=True)):
                return k, reach
        return 0, reach

    def _miss_reason(self, request: Request, hit: int, reach: int) -> str | None:
        """Why the prefix ends after `hit` blocks, where more could be expected; None when nothing was."""
        size, pool = self.block_size, self.pools[0]
        if hit < reach and any(self._find(g, request, reach - 1) for g in range(len(self.pools))):
            request.wanted_blocks = reach
            return f"the windowed layers no longer hold the rows before token {reach * size}"
        if hit == len(request.digests):
            return None
        if pool.was_evicted(request.digests[hit]):
            return f"the cached blocks after token {hit * size} were evicted to make room"
        parent = request.digests[hit - 1] if hit else request.root
        common = pool.longest_start(parent, request.token_ids[hit * size : (hit + 1) * size])
        if hit * size + common >= size and common:
            return f"the prompt differs from what is cached after token {hit * size + common}"
        other = chain_digest(bytes([1 - request.rope_variant]), request.token_ids[:size])
        if not hit and pool.lookup(other, request.token_ids[:size]):
            return "the cached prefix was computed with the other rotary table (short or long context)"
        return None

    def _register(self, request: Request) -> None:
        full = request.num_computed_tokens // self.block_size
        if full <= request.num_registered:
            return
        digests = request.block_digests(self.block_size)
        for entry in range(request.num_registered, full):
            parent = digests[entry - 1] if entry else request.root
            tokens = request.token_ids[entry * self.block_size : (entry + 1) * self.block_size]
            for pool, table in zip(self.pools, request.block_tables, strict=True):
                if table[entry] != NULL_BLOCK:
                    pool.register(table[entry], digests[entry], parent, tokens)
        request.num_registered = full
