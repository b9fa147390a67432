"""Make tests/data/goldens/bert: a tiny random encoder, its hidden states in transformers, its GGUF file.

python -m tests.golden_tools.make_bert OUT_FOLDER
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

from tests.golden_tools.cases import VOCAB
from tests.golden_tools.make_goldens import LENGTHS, SEED, write

CONTEXT = 64
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def build() -> transformers.BertModel:
    """The random model; matrices exact in float16."""
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        attn_implementation="eager",
    )
    model = transformers.BertModel(config, add_pooling_layer=False).float().eval()
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
            values = rng.standard_normal(tuple(parameter.shape))
            if "LayerNorm" in name or name.endswith("bias"):
                values = 0.25 * values + name.endswith("LayerNorm.weight")
            elif "embeddings" not in name:
                values = (1.5 * values / np.sqrt(values.shape[-1])).astype(np.float16)
            values = values.astype(np.float16) if "word_embeddings" in name else values
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    return model


def tensors(model: transformers.BertModel) -> dict[str, np.ndarray]:
    """GGUF name -> float32 array."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, model.config.num_hidden_layers)
    out = {}
    for name, parameter in model.state_dict().items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise SystemExit(f"no GGUF name for {name}")
        out[target] = parameter.numpy()
    return out


def metadata(model: transformers.BertModel) -> dict[str, object]:
    """WordPiece vocabulary: printable characters as word starts (with the phantom space) and as continuations."""
    c = model.config
    printable = [chr(i) for i in range(33, 127)]
    tokens = [*SPECIAL, *("\u2581" + x for x in printable), *printable]
    tokens += [f"\u2581filler{i}" for i in range(VOCAB - len(tokens))]
    keys = {
        "block_count": c.num_hidden_layers,
        "context_length": CONTEXT,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.layer_norm_epsilon": c.layer_norm_eps,
        "attention.causal": False,
        "pooling_type": 1,
    }
    return {f"bert.{key}": value for key, value in keys.items()} | {
        "general.name": "golden-bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (VOCAB - len(SPECIAL)),
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }


def main() -> None:
    folder = Path(sys.argv[1]) / "bert"
    folder.mkdir(parents=True, exist_ok=True)
    model = build()
    rng = np.random.default_rng(SEED)
    golden = {}
    for i, length in enumerate(LENGTHS):
        ids = rng.choice(VOCAB - 5, length, replace=False).astype(np.int32) + 5
        with torch.no_grad():
            hidden = model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
        golden |= {f"ids_{i}": ids, f"hidden_{i}": hidden.numpy()}
    np.savez_compressed(folder / "golden.npz", **golden)
    write(folder / "bert-f16.gguf", "bert", metadata(model), tensors(model))


if __name__ == "__main__":
    main()
