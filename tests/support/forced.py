"""Small real GGUF files whose weights force one reply: each token's successor is fixed through the output matrix.

Attention and feed-forward add nothing (their last matrices are zero), so a token's hidden state is its own embedding;
the output row of its successor is that embedding again, scaled. What the prompt ends with leads into the reply, the
reply's pieces are tokens of their own, and the last one leads to the end token. The file goes through the loader, the
tokenizer, the template, the engine and the server like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.backends.reference import ReferenceBackend
from edgellm.chat.template import ChatTemplate
from edgellm.models import registry
from edgellm.tokenizer import from_metadata
from tests.support.tiny import RandomTensors, byte_tokens, write_gguf

__all__ = ["forced_gguf"]

DIM = 128
SCALE = 5.0
"""The successor's logit is about 57, any other's below 25: forced even at temperature 1."""
BOS, EOS = "<|bos|>", "<|eos|>"
_UNUSED = byte_tokens()[0] * 2
"""The one merge, of bytes that no text holds: the prompt stays one token per byte."""


def forced_gguf(
    path: Path,
    reply: str,
    template: str,
    *,
    controls: Sequence[str] = (),
    ends: str = EOS,
    size: int = 3,
    after: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a file that answers every prompt of `template` with `reply`, then the control token `ends`.

    `controls`: the family's control tokens; where the reply names one it is that token, the first time. Other text is
    cut every `size` bytes, also inside characters. `after`: the text that ends the prompt (default: what the template
    writes, called with `kwargs`).
    """
    names = list(dict.fromkeys([BOS, EOS, *controls]))
    pieces = _pieces(reply, names, size)
    plain = [_stand_in(piece) for piece in pieces if isinstance(piece, bytes)]
    tokens = [*names, *byte_tokens(), *plain, _UNUSED]
    values = _metadata(tokens, len(names), names.index(ends), template)
    ids, next_plain = [], len(names) + 256
    for piece in pieces:
        if isinstance(piece, bytes):
            ids.append(next_plain)
            next_plain += 1
        else:
            ids.append(names.index(piece))
    chain = [_last_of_prompt(values, after, kwargs or {}), *ids, names.index(ends)]
    assert len(set(chain[:-1])) == len(chain) - 1, "a token has two successors"
    _write(path, values, chain)
    return path


def _pieces(reply: str, controls: Sequence[str], size: int) -> list[str | bytes]:
    """Control tokens (str, each once) and distinct runs of bytes."""
    parts: list[str | bytes] = [reply.encode()]
    for name in controls:
        for position, part in enumerate(parts):
            if isinstance(part, bytes) and name.encode() in part:
                before, _, behind = part.partition(name.encode())
                parts[position : position + 1] = [before, name, behind]
                break
    used: set[bytes] = set()
    return [piece for part in parts for piece in ([part] if isinstance(part, str) else _cut(part, size, used))]


def _cut(text: bytes, size: int, used: set[bytes]) -> list[bytes]:
    """Runs of `size` bytes, longer where one was used before (single bytes are the prompt's own tokens)."""
    found: list[bytes] = []
    at = 0
    while at < len(text):
        n = max(size, 2)
        while text[at : at + n] in used and at + n < len(text):
            n += 1
        piece = text[at : at + n]
        if (piece in used or len(piece) < 2) and found:
            used.discard(found[-1])
            piece = found.pop() + piece
        found.append(piece)
        used.add(piece)
        at += n
    return found


def _stand_in(data: bytes) -> str:
    table = byte_tokens()
    return "".join(table[byte] for byte in data)


def _metadata(tokens: list[str], n_controls: int, end: int, template: str) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "general.name": "forced",
        "llama.block_count": 1,
        "llama.context_length": 4096,
        "llama.embedding_length": DIM,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * n_controls + [1] * (len(tokens) - n_controls),
        "tokenizer.ggml.merges": [f"{_UNUSED[0]} {_UNUSED[1]}"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }


def _last_of_prompt(values: dict[str, Any], after: str | None, kwargs: Mapping[str, Any]) -> int:
    tokenizer = from_metadata(values)
    if after is not None:
        return tokenizer.encode(after, special=True, bos=False)[-1]
    template = ChatTemplate.from_metadata(values, tokenizer)
    return template.encode([{"role": "user", "content": "x"}], **kwargs)[-1]


def _write(path: Path, values: dict[str, Any], chain: list[int]) -> None:
    config = registry.config_from_metadata(values)
    tensors = RandomTensors({}, ReferenceBackend(), optional_names=frozenset(["output.weight"]))
    registry.model_class("llama")(config, tensors)
    made = tensors.made
    made["blk.0.attn_output.weight"][:] = 0
    made["blk.0.ffn_down.weight"][:] = 0
    made["output_norm.weight"][:] = 1
    embedding, output = made["token_embd.weight"], made["output.weight"]
    output[:] = 0
    for token, successor in itertools.pairwise(chain):
        row = embedding[token]
        output[successor] += SCALE * row / np.linalg.norm(row)
    write_gguf(path, "llama", values, made, "F16")
