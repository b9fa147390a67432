"""Make the encoders in tests/data/goldens: tiny random ones, their hidden states in transformers, their GGUF.

python -m tests.golden_tools.make_bert OUT_FOLDER
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.golden_tools.make_goldens import LENGTHS, SEED, converted, random_weights, write
from tests.golden_tools.make_goldens import metadata as decoder_metadata
from tests.golden_tools.rules import COMMON, VOCAB, WINDOW, Case

CONTEXT = 64
IDENTITY = np.eye(64, dtype=np.float32)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


class PlainMLP(torch.nn.Module):
    """down(gelu(up x)) with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class PlainMoE(torch.nn.Module):
    """Two of four experts without biases, each computed for all tokens and weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(64, 4, bias=False)
        self.up, self.down = (torch.nn.Parameter(torch.zeros(4, *shape)) for shape in ((96, 64), (64, 96)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        weights = torch.where(weights >= weights.topk(2, -1).values[..., -1:], weights, 0)
        each = torch.nn.functional.gelu(torch.einsum("btd,efd->btef", x, self.up))
        return torch.einsum("btef,edf,bte->btd", each, self.down, weights)


def build(arch: str) -> transformers.PreTrainedModel:
    """The random model; matrices exact in float16."""
    name = {"bert": "Bert", "nomic-bert": "NomicBert", "nomic-bert-moe": "NomicBert"}[arch]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        attn_implementation="eager",
    )
    model = getattr(transformers, f"{name}Model")(config, add_pooling_layer=False).float().eval()
    if arch == "nomic-bert-moe":  # of which transformers has no class
        model.layers[0].mlp, model.layers[1].mlp = PlainMLP(), PlainMoE()
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
            values = rng.standard_normal(tuple(parameter.shape))
            if "layernorm" in name.lower() or name.endswith("bias"):
                values = 0.25 * values + name.lower().endswith("layernorm.weight")
            elif "embeddings" not in name:
                values = (1.5 * values / np.sqrt(values.shape[-1])).astype(np.float16)
            values = values.astype(np.float16) if "word_embeddings" in name else values
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    return model


def tensors(model: transformers.PreTrainedModel, arch: str) -> dict[str, np.ndarray]:
    """GGUF name -> float32 array. nomic-bert files hold q, k and v in one tensor."""
    state = {name: parameter.numpy() for name, parameter in model.state_dict().items()}
    if arch.startswith("nomic-bert"):
        return nomic_tensors(state, model.config.num_hidden_layers)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, model.config.num_hidden_layers)
    out = {}
    for name, data in state.items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise SystemExit(f"no GGUF name for {name}")
        out[target] = data
    return out


def nomic_tensors(state: dict[str, np.ndarray], n_layers: int) -> dict[str, np.ndarray]:
    """The published files come from a checkpoint with other names, so these are spelled out."""
    out = {
        "token_embd.weight": state["embeddings.word_embeddings.weight"],
        "token_types.weight": state["embeddings.token_type_embeddings.weight"],
        "token_embd_norm.weight": state["embeddings.LayerNorm.weight"],
        "token_embd_norm.bias": state["embeddings.LayerNorm.bias"],
    }
    plain = {
        "attn_output.weight": "self_attn.o_proj.weight",
        "attn_output_norm.weight": "post_attention_layernorm.weight",
        "attn_output_norm.bias": "post_attention_layernorm.bias",
        "layer_output_norm.weight": "post_mlp_layernorm.weight",
        "layer_output_norm.bias": "post_mlp_layernorm.bias",
    }
    feeds = [(f"ffn_{x}.weight", f"mlp.{x}_proj.weight") for x in ("gate", "up", "down")]
    feeds += [(f"ffn_{x}.{kind}", f"mlp.{x}.{kind}") for x in ("up", "down") for kind in ("weight", "bias")]
    feeds += [(f"ffn_{x}_exps.weight", f"mlp.{x}") for x in ("up", "down")]
    feeds += [("ffn_gate_inp.weight", "mlp.router.weight")]
    for i in range(n_layers):
        names = [*plain.items(), *(pair for pair in feeds if f"layers.{i}.{pair[1]}" in state)]
        out |= {f"blk.{i}.{ours}": state[f"layers.{i}.{theirs}"] for ours, theirs in names}
        qkv = [state[f"layers.{i}.self_attn.{x}_proj.weight"] for x in "qkv"]
        out[f"blk.{i}.attn_qkv.weight"] = np.concatenate(qkv)
    return out


def metadata(model: transformers.PreTrainedModel, arch: str) -> dict[str, object]:
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
    if arch.startswith("nomic-bert"):
        keys["rope.freq_base"] = 1000.0
    if arch == "nomic-bert-moe":
        keys |= {"expert_count": 4, "expert_used_count": 2, "moe_every_n_layers": 2}
    return {f"{arch}.{key}": value for key, value in keys.items()} | {
        "general.name": f"golden-{arch}",
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


def save(folder: Path, arch: str, model: Any, head: np.ndarray, keys: dict[str, Any], values: Any) -> None:
    """`head`: what follows the model's last hidden states, (dim, dim)."""
    folder = folder / arch
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    golden = {}
    for i, length in enumerate(LENGTHS):
        ids = rng.choice(VOCAB - 5, length, replace=False).astype(np.int32) + 5
        with torch.no_grad():
            hidden = model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
        golden |= {f"ids_{i}": ids, f"hidden_{i}": hidden.numpy() @ head.T}
    np.savez_compressed(folder / "golden.npz", **golden)
    write(folder / f"{arch}-f16.gguf", arch, keys, values)


def gemma(folder: Path) -> None:
    """EmbeddingGemma: Gemma 3 that sees both ways, six layers, and the two products of sentence-transformers."""
    keys = {"attention.sliding_window": WINDOW, "rope.freq_base": 1e6, "pooling_type": 1}
    keys |= {"dense_2_feat_in": 64, "dense_2_feat_out": 96, "dense_3_feat_in": 96, "dense_3_feat_out": 64}
    case = Case("gemma-embedding", "gemma-embedding", "Gemma3", keys=keys, norm_plus_one=True, rule=below_model)
    config = transformers.Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW},
        use_bidirectional_attention=True,
        attn_implementation="eager",
    )
    model = transformers.Gemma3TextModel(config).float().eval()
    with torch.no_grad():
        random_weights(model, case)
    rng = np.random.default_rng(SEED)
    dense = {f"dense_{i}.weight": rng.standard_normal(shape) / 8 for i, shape in ((2, (96, 64)), (3, (64, 96)))}
    dense = {name: data.astype(np.float16).astype(np.float32) for name, data in dense.items()}
    head = dense["dense_3.weight"] @ dense["dense_2.weight"]
    save(folder, case.arch, model, head, decoder_metadata(model, case), converted(model, case) | dense)


def euro(folder: Path) -> None:
    """EuroBERT; a Llama that sees both ways has no class in transformers and is the same, q and k re-ordered."""
    for arch in ("eurobert", "llama-embed"):
        config = transformers.EuroBertConfig(**{**COMMON, "tie_word_embeddings": True}, attn_implementation="eager")
        model = transformers.EuroBertModel(config).float().eval()
        keys = {"pooling_type": 1, "attention.causal": False}
        case = Case(arch, arch, "EuroBert", keys=keys, permuted=arch == "llama-embed", rule=below_model)
        with torch.no_grad():
            random_weights(model, case)
        save(folder, arch, model, IDENTITY, decoder_metadata(model, case), converted(model, case))


def modern(folder: Path) -> None:
    """ModernBERT, four layers: the first and the last see the whole text."""
    more = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}
    more |= {name: 0 for name in ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")}
    config = transformers.ModernBertConfig(
        **more, num_attention_heads=4, local_attention=WINDOW, attn_implementation="eager"
    )
    model = transformers.ModernBertModel(config).float().eval()
    keys = {
        "attention.head_count_kv": 4,
        "attention.layer_norm_epsilon": config.norm_eps,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": 160000.0,
        "rope.freq_base_swa": 10000.0,
        "pooling_type": 1,
    }
    case = Case("modern-bert", "modern-bert", "ModernBert", keys=keys)
    with torch.no_grad():
        random_weights(model, case)
    config.num_key_value_heads = 4
    save(folder, case.arch, model, IDENTITY, decoder_metadata(model, case), converted(model, case))


def below_model(name: str, data: np.ndarray) -> dict[str, np.ndarray]:
    """A model without a head calls its tensors without the first word."""
    return {f"model.{name}": data}


def main() -> None:
    for arch in ("bert", "nomic-bert", "nomic-bert-moe"):
        model = build(arch)
        save(Path(sys.argv[1]), arch, model, IDENTITY, metadata(model, arch), tensors(model, arch))
    gemma(Path(sys.argv[1]))
    modern(Path(sys.argv[1]))
    euro(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
