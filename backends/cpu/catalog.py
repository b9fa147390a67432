"""Every kernel that a model may ask for, so that they can be compiled ahead.

Attention kernels are made for one pair of head sizes and one number of query heads per KV head; here are those of the
model families people run. A model with other ones compiles its own when it is first used.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgellm.backends.cpu import (
    bandwidth,
    elementwise,
    embed,
    experts,
    kv,
    largest,
    matmul,
    matmul_float,
    quantise,
    rope,
    team,
)
from edgellm.backends.cpu.attention import attention_combine
from edgellm.backends.cpu.attention_record import attention_kernels
from edgellm.backends.cpu.jit import Kernel
from edgellm.quants import QUANT_TABLE, GGMLType

__all__ = ["ATTENTION_SHAPES", "all_kernels"]

ATTENTION_SHAPES = (
    # (head size, query heads per KV head): families
    *((64, 3), (64, 4), (64, 8)),  # SmolLM2 135M; Llama 3.2 1B; gpt-oss
    *((64, 7), (128, 6)),  # Qwen2.5 0.5B; Qwen2.5 1.5B
    *((128, 2), (128, 4), (128, 8)),  # Qwen3 0.6B; Llama 3 8B, Qwen3 8B, Mistral 7B; Llama 3 70B
    *((128, 7), (128, 3), (96, 1)),  # Qwen2.5 7B; Llama 3.2 3B, Phi-4-mini; Phi-3
    *((256, 4), (256, 2)),  # Gemma 3 270M and 1B; Gemma 2 and 3
)


def all_kernels(kv_type: str = "f16") -> Iterator[Kernel]:
    """The kernels, those that every model needs first; some come twice."""
    yield from team.KERNELS
    yield bandwidth.read_memory
    yield from elementwise.NORMS.values()
    yield from (elementwise.add_scaled, elementwise.take_rows, elementwise.copy_columns, elementwise.concat_rows)
    yield from elementwise.SCALES.values()
    yield from elementwise.ACTIVATIONS.values()
    yield from embed.KERNELS.values()
    yield from rope.ROTATIONS.values()
    yield kv.STORES[kv_type]
    yield from largest.KERNELS
    yield attention_combine
    yield from matmul_float.KERNELS.values()
    for block, panels in quantise.PANELS.items():
        kinds = [kind for kind in sorted(matmul.QUANTISED) if QUANT_TABLE[GGMLType[kind]].block_size == block]
        yield from (quantise.quantise_kernel(block, panel) for panel in panels)
        yield from (
            matmul.linear_kernel(kind, panel, single) for kind in kinds for panel in panels for single in (True, False)
        )
    yield from experts.all_expert_kernels()
    for head_dim, group in ATTENTION_SHAPES:
        yield from attention_kernels(kv_type, head_dim, head_dim, group)
