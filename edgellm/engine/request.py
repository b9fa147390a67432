"""One request as the scheduler sees it: token ids, how far they are computed, and where their rows lie."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from edgellm.memory import MAX_CHUNK

__all__ = ["Request", "Status", "Task", "chain_digest"]


class Status(Enum):
    """Where a request stands. A preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Task(Enum):
    """What a request is for: new tokens, the logits of every position, or the hidden states of every position."""

    GENERATE = "generate"
    LOGITS = "logits"
    HIDDEN = "hidden"


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of a full block: its token ids and, through `parent`, all ids before them."""
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


@dataclass(eq=False)
class Request:
    """Identity is the object. `token_ids` are the prompt and what was generated; drafts are kept apart until accepted.

    The one progress rule: each step, `num_computed_tokens` catches up with `num_tokens`. A row of the cache is valid
    for positions below `num_computed_tokens`; the last known token is never computed before it is scheduled.
    """

    request_id: int
    token_ids: list[int]
    max_tokens: int
    """New tokens at most; 0 computes the prompt and nothing else."""
    task: Task = Task.GENERATE
    rope_variant: int = 0
    share_prefix: bool = True
    """False where rows depend on more than the tokens before them (encoders), or all rows are wanted."""
    whole_prompt: bool = False
    """Compute the prompt in one step, never in chunks (encoders: every row sees the whole sequence)."""
    max_chunk: int = MAX_CHUNK

    num_computed_tokens: int = 0
    draft_ids: list[int] = field(default_factory=list)
    """Guesses for the tokens after `token_ids`, to be verified in the next step."""
    status: Status = Status.WAITING
    computing: bool = False  # part of it is in a pass over several steps (slices.py): nothing is scheduled meanwhile
    block_tables: list[list[int]] = field(default_factory=list)
    """Per cache group, block of positions [i * block_size, (i + 1) * block_size); 0 where none is held (any more)."""
    num_released: list[int] = field(default_factory=list)
    """Per cache group, table entries given back because the window has passed them."""
    digests: list[bytes] = field(default_factory=list)
    """Chain digests of the full blocks of `token_ids`, as far as they were needed."""
    num_registered: int = 0
    """Full blocks that can already be found by other requests."""
    num_cached_tokens: int = 0
    """Tokens found in the prefix cache when the request was first admitted."""
    cache_miss: str | None = None  # why an expected prefix was not (wholly) found
    wanted_blocks: int = 0
    """A prefix of that many blocks was known but its windowed rows were gone: this request keeps them for the next."""
    swapped: bool = False
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known, drafts not counted."""
        return len(self.token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that are not in the cache yet; at least 1 while the request runs."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def root(self) -> bytes:
        """Parent of the first block's digest: what rows depend on besides the tokens."""
        return bytes([self.rope_variant])

    def block_digests(self, block_size: int) -> list[bytes]:
        """Chain digests of all full blocks of `token_ids`."""
        for i in range(len(self.digests), len(self.token_ids) // block_size):
            parent = self.digests[-1] if self.digests else self.root
            self.digests.append(chain_digest(parent, self.token_ids[i * block_size : (i + 1) * block_size]))
        return self.digests
