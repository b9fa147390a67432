"""Blocks of one cache group: who holds them, which are free, and which can be found again by their content.

A block is in exactly one of three places:

    held       ref_count > 0: in the block table of one request or more
    evictable  ref_count = 0, but its rows are named by a digest: a later request may take it; oldest goes first
    clean      ref_count = 0 and nothing worth keeping; last in, first out, so that few pages of memory are touched

Block 0 is the null block: it stands in tables where nothing is held, and belongs to nobody.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["NULL_BLOCK", "BlockPool"]

NULL_BLOCK = 0
MAX_EVICTED = 16384  # digests remembered, only to tell a miss by eviction from a prompt never seen


class BlockPool:
    """Blocks 1 .. num_blocks with reference counts. Plain ints; moving bytes is the caller's work."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.num_begun = 0  # 1 .. num_begun were given to somebody before; nobody had those behind
        self.ref_counts = [0] * (num_blocks + 1)
        self._digests: list[bytes | None] = [None] * (num_blocks + 1)
        self._parents: list[bytes] = [b""] * (num_blocks + 1)
        self._tokens: list[tuple[int, ...]] = [()] * (num_blocks + 1)
        self._by_digest: dict[bytes, int] = {}
        self._by_parent: dict[bytes, set[int]] = {}
        self._clean = list(range(num_blocks, 0, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: clean ones and evictable ones."""
        return len(self._clean) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by content, held or not."""
        return len(self._by_digest)

    def allocate(self, n: int) -> list[int]:
        """Take n of `num_free` blocks, each with one reference; evicts the oldest cached ones when none is clean."""
        blocks = []
        for _ in range(n):
            if self._clean:
                block = self._clean.pop()
                self.num_begun = max(self.num_begun, block)
            else:
                block, _ = self._evictable.popitem(last=False)
                self._remember_evicted(block)
                self._forget(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def take(self, block: int) -> None:
        """Add a reference to a block found by `lookup`."""
        if self.ref_counts[block] == 0:
            del self._evictable[block]
        self.ref_counts[block] += 1

    def release(self, block: int, keep: bool = True) -> None:
        """Drop one reference; the last one makes the block evictable (`keep` and named) or clean."""
        self.ref_counts[block] -= 1
        if self.ref_counts[block]:
            return
        if keep and self._digests[block] is not None:
            self._evictable[block] = None
        else:
            self._forget(block)
            self._clean.append(block)

    def register(self, block: int, digest: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        """Name a held block by its content. The first block of a content stays the one that is found."""
        if digest in self._by_digest or self._digests[block] is not None:
            return
        self._digests[block], self._parents[block], self._tokens[block] = digest, parent, tuple(tokens)
        self._by_digest[digest] = block
        self._by_parent.setdefault(parent, set()).add(block)
        self._evicted.pop(digest, None)

    def lookup(self, digest: bytes, tokens: Sequence[int]) -> int | None:
        """The block of that content, or None. The ids are compared, so a digest alone is never trusted."""
        block = self._by_digest.get(digest)
        return block if block is not None and self._tokens[block] == tuple(tokens) else None

    def was_evicted(self, digest: bytes) -> bool:
        """Whether a block of that content was here and had to go."""
        return digest in self._evicted

    def longest_start(self, parent: bytes, tokens: Sequence[int]) -> int:
        """How many of `tokens` the nearest cached block after `parent` begins with."""
        children = (self._tokens[block] for block in self._by_parent.get(parent, ()))
        same = ([a == b for a, b in zip(child, tokens, strict=False)] + [False] for child in children)
        return max((flags.index(False) for flags in same), default=0)

    def named_blocks(self) -> list[tuple[int, bytes, bytes, tuple[int, ...]]]:
        """(block, digest, parent, tokens) of all cached blocks, oldest evictable first, held ones last."""
        order = [*self._evictable, *(b for b in self._by_digest.values() if self.ref_counts[b])]
        return [(b, self._digests[b] or b"", self._parents[b], self._tokens[b]) for b in order]

    def check_integrity(self, held: Iterable[int]) -> None:
        """RuntimeError unless each block is in exactly one place. `held`: entries of all tables, without nulls."""
        counts = Counter(held)
        clean = set(self._clean)
        if len(clean) != len(self._clean) or clean & self._evictable.keys():
            raise RuntimeError("a block is free twice")
        for block in range(1, self.num_blocks + 1):
            if self.ref_counts[block] != counts[block]:
                raise RuntimeError(f"block {block}: {self.ref_counts[block]} references, {counts[block]} tables")
            free = (block in clean) + (block in self._evictable)
            if free != (counts[block] == 0):
                raise RuntimeError(f"block {block} with {counts[block]} references is in {free} free lists")
            if block in clean and self._digests[block] is not None:
                raise RuntimeError(f"clean block {block} still has a name")
        named = {b for b in range(1, self.num_blocks + 1) if self._digests[b] is not None}
        if named != set(self._by_digest.values()) or named != set().union(*self._by_parent.values()):
            raise RuntimeError("the index of cached blocks does not match the blocks")

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is None:
            return
        del self._by_digest[digest]
        siblings = self._by_parent[self._parents[block]]
        siblings.discard(block)
        if not siblings:
            del self._by_parent[self._parents[block]]
        self._digests[block], self._parents[block], self._tokens[block] = None, b"", ()

    def _remember_evicted(self, block: int) -> None:
        self._evicted[self._digests[block] or b""] = None
        if len(self._evicted) > MAX_EVICTED:
            self._evicted.popitem(last=False)
