"""Memory of cache blocks, taken a little before they are needed.

The system hands out memory when it is first written, 2 MB at a time, which takes a virtual machine 2 to 3 ms. Answers
that began together come to a new block together: without this, one step in 32 would wait for all of their memory.
"""

from __future__ import annotations

from collections.abc import Callable

from edgellm.engine.kv_cache import KVCache

__all__ = ["BlocksAhead"]


class BlocksAhead:
    """`touch(group, block)` takes the memory of one block. Windows use few blocks again and again: nothing to do."""

    def __init__(self, kv: KVCache, touch: Callable[[int, int], None]):
        self._touch = touch
        self._pools = [(g, pool) for g, pool in enumerate(kv.pools) if not kv.kinds[g].recycles]
        self._ready = dict.fromkeys((g for g, _ in self._pools), 0)

    def advance(self, num_running: int) -> None:
        """Touch at most one block of each group, up to one for each running request beyond those in use."""
        for group, pool in self._pools:
            block = max(self._ready[group], pool.num_begun) + 1
            if block <= min(pool.num_begun + num_running, pool.num_blocks):
                self._touch(group, block)
                self._ready[group] = block
