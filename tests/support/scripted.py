"""T2: a model without weights, where the model runner sits. It says what a script says, at a chosen speed.

The scripted model checks what the engine promises its runner: every position of a sequence is written exactly once
and in order (or after a rollback again), and only into blocks of that sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgellm.config import EngineConfig
from edgellm.engine.request import Task
from edgellm.engine.scheduler import Schedule
from edgellm.llm import LLM
from edgellm.models.config import ModelConfig, RopeConfig

__all__ = ["ByteTokenizer", "ScriptedRunner", "hash_script", "model_config", "say", "scripted_llm"]

EOS = 0
VOCAB = 512
"""0: end token; 1..255: bytes as themselves; 256 and up: control tokens `<256>` ..."""

Script = Callable[[Sequence[int]], "int | np.ndarray | Exception"]
"""From all token ids so far to the next id, to a row of logits, or to an exception that the step raises."""


class ByteTokenizer:
    """One token per byte; 0 is the end token."""

    eog_ids = frozenset({EOS})
    bos_id, eos_id, unk_id, pad_id = None, EOS, None, None
    add_bos = False
    vocab_size = VOCAB
    tokens = tuple(chr(i) if i < 256 else f"<{i}>" for i in range(VOCAB))

    def encode(self, text: str, special: bool = False, bos: bool | None = None) -> list[int]:
        return [b for b in text.encode() if b]

    def split_specials(self, text: str) -> list[str | int]:
        return [text]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if 0 < id < 256 else b""

    def is_control(self, id: int) -> bool:
        return id == EOS or id >= 256

    def stream_decoder(self, after: int | None = None, show: Container[int] = ()) -> Any:
        from edgellm.tokenizer.stream import StreamDecoder

        return StreamDecoder(self.token_bytes, False)


class PlainTemplate:
    """`role: content` lines."""

    is_fallback = supports_tools = supports_thinking = False
    source = ""

    def encode(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any) -> list[int]:
        return ByteTokenizer().encode(self.render(messages))

    def render(self, messages: Any, **kwargs: Any) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "


class ScriptedRunner:
    """A `Runner`. `delay`: seconds per step, `token_delay`: more per token of the step. `parts`: how often a pass must
    be advanced until it is done; 0: no passes.

    The "rows" it stores are the token ids of each position, so that reading a block that was lost, moved or shared
    wrongly gives a wrong history, and a wrong history a wrong answer."""

    def __init__(
        self, script: Script, config: ModelConfig, delay: float = 0.0, token_delay: float = 0.0, parts: int = 0
    ):
        self.script, self.config = script, config
        self.can_pause, self.parts = parts > 0, parts
        self.delay, self.token_delay = delay, token_delay
        self.block_size = 32
        self.rows: list[dict[int, list[int]]] = [{} for _ in config.cache_groups]
        self.steps: list[list[tuple[int, int, int]]] = []
        """Per step: (request_id, tokens, drafts) of each item."""
        self.passes: list[ScriptedPass] = []
        self.touched: list[tuple[int, int]] = []
        self.closed = False

    def run(self, schedule: Schedule) -> list[np.ndarray]:
        self.steps.append([(i.request.request_id, i.num_scheduled_tokens, i.num_draft_tokens) for i in schedule.items])
        if self.delay or self.token_delay:
            time.sleep(self.delay + self.token_delay * schedule.num_tokens)
        return [self._compute(item) for item in schedule.items]

    def begin(self, schedule: Schedule) -> ScriptedPass:
        self.passes.append(ScriptedPass(self, schedule))
        return self.passes[-1]

    def _compute(self, item: Any) -> np.ndarray:
        request = item.request
        begin = request.num_computed_tokens
        end = begin + item.num_scheduled_tokens
        ids = [*request.token_ids[begin : end - item.num_draft_tokens], *request.draft_ids[: item.num_draft_tokens]]
        for group, table in enumerate(request.block_tables):
            for position, token in zip(range(begin, end), ids, strict=True):
                block, offset = table[position // self.block_size], position % self.block_size
                assert block, "a token was scheduled without a block"
                row = self.rows[group].setdefault(block, [])
                assert len(row) >= offset, "a position was left out"
                row[offset:] = [token]
        first = end - item.num_output_rows
        outputs = [self._row(self._history(request, n + 1), request.task) for n in range(first, end)]
        return np.array(outputs, np.float32).reshape(len(outputs), VOCAB)

    def _history(self, request: Any, n: int) -> list[int]:
        """The sequence as the cache holds it: full groups from the start, windowed ones in their window."""
        tokens = [*request.token_ids, *request.draft_ids][:n]
        for group, (table, kind) in enumerate(zip(request.block_tables, self.config.cache_groups, strict=True)):
            for position in range(max(0, n - kind.window) if kind.window else 0, n):
                row = self.rows[group][table[position // self.block_size]]
                tokens[position] = row[position % self.block_size]
        return tokens

    def _row(self, tokens: list[int], task: Task) -> np.ndarray:
        said = self.script(tokens)
        if isinstance(said, Exception):
            raise said
        if isinstance(said, (int, np.integer)):
            row = np.zeros(VOCAB, np.float32)
            row[int(said)] = 20.0
            return row
        return said

    def copy_block(self, group: int, source: int, target: int) -> None:
        self.rows[group][target] = list(self.rows[group][source])

    def read_block(self, group: int, block: int) -> bytes:
        row = self.rows[group].get(block, [])
        return np.array([len(row), *row, *[0] * (self.block_size - len(row))], np.int32).tobytes()

    def write_block(self, group: int, block: int, data: bytes) -> None:
        n, *row = np.frombuffer(data, np.int32).tolist()
        self.rows[group][block] = row[:n]

    def touch_block(self, group: int, block: int) -> None:
        assert block not in self.rows[group], "only blocks that nobody had are new"
        self.touched.append((group, block))

    def close(self) -> None:
        self.closed = True


class ScriptedPass:
    """Does all of its work when it is advanced for the last time: rows of a request that is gone would show."""

    def __init__(self, runner: ScriptedRunner, schedule: Schedule):
        self.runner, self.schedule, self.granted = runner, schedule, list[float]()
        self._rows: list[np.ndarray] = []

    def advance(self, seconds: float) -> bool:
        self.granted.append(seconds)
        if len(self.granted) < self.runner.parts and seconds != float("inf"):
            return False
        self._rows = [self.runner._compute(item) for item in self.schedule.items]
        return True

    def rows(self) -> list[np.ndarray]:
        return self._rows


def say(text: str, end: bool = True) -> Script:
    """A script that answers any prompt with `text`, byte by byte, then the end token (or the text again)."""
    data = text.encode()

    def script(tokens: Sequence[int]) -> int:
        # The longest end of the sequence that is a beginning of the text says how far the answer is.
        for n in range(min(len(data), len(tokens)), 0, -1):
            if list(tokens[-n:]) == list(data[:n]):
                return data[n] if n < len(data) else EOS if end else data[0]
        return data[0]

    return script


def hash_script(tokens: Sequence[int]) -> np.ndarray:
    """Logits that depend on every token of the sequence, never favouring the end token."""
    rng = np.random.default_rng([len(tokens), *tokens])
    row = rng.standard_normal(VOCAB).astype(np.float32) * 3
    row[EOS] = row[256:] = -50.0
    return row


def model_config(context_length: int = 4096, windows: tuple[int, ...] = (0,), **changes: Any) -> ModelConfig:
    """The shape a scripted model pretends to have; one layer per entry of `windows`."""
    shape = SimpleNamespace(n_layers=len(windows), dim=8, n_heads=1, n_kv_heads=1, k_dim=8, v_dim=8, ffn_dim=8)
    values: dict[str, Any] = {
        **vars(shape),
        "arch": "scripted",
        "vocab_size": VOCAB,
        "context_length": context_length,
        "norm_eps": 1e-5,
        "rope": RopeConfig(n_dims=8),
        "windows": windows,
    }
    return ModelConfig(**{**values, **changes})


def scripted_llm(
    script: Script | str,
    ctx: int = 1024,
    delay: float = 0.0,
    token_delay: float = 0.0,
    windows: tuple[int, ...] = (0,),
    num_blocks: Sequence[int] | None = None,
    **engine: Any,
) -> LLM:
    """An `LLM` that says what the script says (a string: that text). `llm.engine.runner` is the ScriptedRunner."""
    config = model_config(ctx, windows)
    runner = ScriptedRunner(say(script) if isinstance(script, str) else script, config, delay, token_delay)
    settings = EngineConfig(ctx=ctx, **{"max_seqs": 16, **engine})
    return LLM.from_parts(settings, config, runner, ByteTokenizer(), PlainTemplate(), num_blocks)
