"""T4: a tiny random GGUF model of any architecture, written with the `gguf` package's writer.

The tensors are those the architecture asks for when it is built, so a new architecture needs nothing here. Text is
noise, but deterministic: same arguments, same file. The tokenizer is byte-level BPE (`gpt2`): three control tokens,
256 bytes, some merges, then filler tokens that no text produces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np

from edgellm.backends.reference import ReferenceBackend
from edgellm.models import registry
from edgellm.models.tensors import Tensors
from edgellm.quants import GGMLType, QTensor
from tests.support.bpe import MERGES, byte_tokens

__all__ = ["CHATML", "EOS_ID", "IM_END_ID", "IM_START_ID", "RandomTensors", "byte_tokens", "tiny_gguf", "write_gguf"]

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class RandomTensors(Tensors):
    """Makes each tensor it is asked for. `optional`: names (without layer prefix) to make where a model may do
    without."""

    optional_names: frozenset[str] = frozenset()
    seed: int = 0
    made: dict[str, np.ndarray] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.optional_names

    def find(self, name: str, *shape: int) -> QTensor:
        full = self.prefix + name
        if full not in self.made:
            rng = np.random.default_rng([self.seed, crc32(full.encode())])
            values = rng.standard_normal(shape)
            if name.endswith("norm.weight"):
                values = 1 + 0.25 * values
                if name == "output_norm.weight":  # or a tied model would just repeat its input
                    values *= rng.choice([-1, 1], shape)
            elif name.startswith("rope_factors") or name.startswith("rope_freqs"):
                values = 1 + rng.random(shape)
            elif len(shape) == 1 or name.endswith(".bias"):
                values = 0.25 * values
            elif not name.startswith("token_embd"):
                gain = 1.5 if "attn_q" in name or "attn_k" in name else 1.0
                values = gain * values / math.sqrt(shape[-1])
            self.made[full] = values.astype(np.float32)
        data = self.made[full].view(np.uint8)
        return QTensor(full, GGMLType.F32, shape, data.reshape(*shape[:-1], shape[-1] * 4))


def tiny_gguf(
    path: Path | str,
    arch: str = "llama",
    *,
    seed: int = 0,
    n_layers: int = 2,
    dim: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    ffn_dim: int = 96,
    n_experts: int = 4,
    n_experts_used: int = 2,
    vocab_size: int = 300,
    context_length: int = 256,
    window: int = 8,
    quant: str = "F16",
    optional: Sequence[str] = (),
    chat_template: str | None = CHATML,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write the file and return its path.

    `quant`: any type the `gguf` package can make (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0), for matrices whose
    rows divide into its blocks. `optional`: tensors a model may have ("output.weight", "attn_q.bias").
    `metadata`: full keys to add or replace; None leaves the key out.
    """
    tokens = [*CONTROL_TOKENS, *byte_tokens(), *(m.replace(" ", "") for m in MERGES)]
    tokens += [f"<filler_{i}>" for i in range(vocab_size - len(tokens))]
    values: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": f"tiny-{arch}",
        f"{arch}.block_count": n_layers,
        f"{arch}.context_length": context_length,
        f"{arch}.embedding_length": dim,
        f"{arch}.feed_forward_length": ffn_dim,
        f"{arch}.attention.head_count": n_heads,
        f"{arch}.attention.head_count_kv": n_kv_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.attention.layer_norm_epsilon": 1e-5,
        f"{arch}.attention.sliding_window": window,
        f"{arch}.rope.freq_base": 10000.0,
        **_expert_keys(arch, ffn_dim, n_experts, n_experts_used),
        **_latent_keys(arch, head_dim),
        **_activation_keys(arch, n_layers),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens[:vocab_size],
        "tokenizer.ggml.token_type": [3 if i < len(CONTROL_TOKENS) else 1 for i in range(vocab_size)],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": EOS_ID,
        "tokenizer.ggml.eos_token_id": IM_END_ID if chat_template else EOS_ID,
        "tokenizer.ggml.padding_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": chat_template,
        **(metadata or {}),
    }
    values = {key: value for key, value in values.items() if value is not None}
    config = registry.config_from_metadata(values)
    tensors = RandomTensors({}, ReferenceBackend(), optional_names=frozenset(optional), seed=seed)
    registry.model_class(arch)(config, tensors)
    write_gguf(Path(path), arch, values, tensors.made, quant)
    return Path(path)


def _expert_keys(arch: str, ffn_dim: int, n_experts: int, n_used: int) -> dict[str, int]:
    if "moe" not in arch and arch not in ("gpt-oss", "dots1", "deepseek", "deepseek2", "bailingmoe2", "minimax-m2"):
        return {}
    return {
        f"{arch}.expert_count": n_experts,
        f"{arch}.expert_used_count": n_used,
        f"{arch}.expert_feed_forward_length": ffn_dim,
        f"{arch}.expert_shared_feed_forward_length": ffn_dim,
    }


def _latent_keys(arch: str, head_dim: int) -> dict[str, int]:
    if arch not in ("deepseek2", "minicpm3"):
        return {}
    return {f"{arch}.attention.kv_lora_rank": 2 * head_dim, f"{arch}.rope.dimension_count": head_dim // 2}


def _activation_keys(arch: str, n_layers: int) -> dict[str, list[float]]:
    names = ("alpha_p", "alpha_n", "beta") if arch == "apertus" else ()
    return {f"xielu.{name}": [0.5] * n_layers for name in names}


def write_gguf(path: Path, arch: str, values: Mapping[str, Any], tensors: Mapping[str, np.ndarray], quant: str) -> None:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        if key == "general.architecture":
            continue
        add: dict[type, Any] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    wanted = gguf.GGMLQuantizationType[quant]
    for name, data in tensors.items():
        block_size = gguf.GGML_QUANT_SIZES[wanted][0]
        if data.ndim < 2 or data.shape[-1] % block_size or name.endswith((".bias", "ffn_gate_inp.weight")):
            writer.add_tensor(name, data)
        else:
            packed = gguf.quants.quantize(data, wanted)
            writer.add_tensor(name, packed, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
