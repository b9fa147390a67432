"""Memory of cache blocks, taken a little before they are needed.

The system hands out memory when it is first written, 2 MB at a time, which takes a virtual machine 2 to 3 ms. Answers
that began together come to a new block together: without this, one step in 32 would wait for all of their memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from math import inf

from edgellm.engine.block_pool import BlockPool

__all__ = ["BlocksAhead"]


class BlocksAhead:
    """`pools`: those of cache groups that grow (windows use few blocks again and again); `touch(group, block)` takes
    the memory of one block."""

    def __init__(self, pools: Mapping[int, BlockPool], touch: Callable[[int, int], None]):
        self._pools, self._touch = pools, touch
        self._ready = dict.fromkeys(pools, 0)
        self._took: deque[float] = deque(maxlen=8)
        """Seconds of recent ones: of most next to nothing, of one in a few those of a large page."""

    def advance(self, num_running: int, seconds: float = inf) -> None:
        """Touch at most one block of each group, up to one for each running request beyond those in use. `seconds`:
        the time there is; what may take longer is left for a later step, until half of those blocks are gone."""
        for group, pool in self._pools.items():
            block = max(self._ready[group], pool.num_begun) + 1
            if block > min(pool.num_begun + num_running, pool.num_blocks):
                continue
            if seconds >= max(self._took, default=0.0) or block <= pool.num_begun + num_running // 2:
                began = time.perf_counter()
                self._touch(group, block)
                self._took.append(time.perf_counter() - began)
                self._ready[group] = block
