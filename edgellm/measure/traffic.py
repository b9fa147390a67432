"""How many bytes one step must read: what a speed is held against."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.memory import row_bytes
from edgellm.models.config import ModelConfig
from edgellm.quants import QTensor

__all__ = ["kv_read_bytes", "weight_read_bytes"]


def weight_read_bytes(tensors: Mapping[str, QTensor], config: ModelConfig, n_tokens: int, n_logits: int) -> float:
    """Bytes of weights that one pass over `n_tokens` tokens with `n_logits` output rows reads, each weight once.

    Of the embedding table `n_tokens` rows are read; where it is also the output head, all of it when there are logits.
    Of n experts, n (1 - (1 - used / n)^n_tokens) are expected to be chosen by at least one token.
    """
    tied = "output.weight" not in tensors
    total = 0.0
    for name, tensor in tensors.items():
        if name == "token_embd.weight":
            head = tied and n_logits > 0
            total += tensor.nbytes if head else min(tensor.nbytes, n_tokens * tensor.row_bytes)
        elif config.skips(name) or (name.startswith("output.") and not n_logits):
            continue
        elif "_exps." in name and config.n_experts:
            unused = (1 - config.n_experts_used / config.n_experts) ** n_tokens
            total += tensor.nbytes * (1 - unused)
        else:
            total += tensor.nbytes
    return total


def kv_read_bytes(config: ModelConfig, kv_type: str, length: float) -> float:
    """Bytes of cache that one token reads at a sequence of `length` positions, windowed layers at most their window."""
    row = row_bytes(config, kv_type)
    return row * sum(
        len(group.layers) * (min(length, group.window) if group.window else length) for group in config.cache_groups
    )
