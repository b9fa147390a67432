"""Make tests/data/goldens: tiny random models, their float32 logits in transformers, and their GGUF files.

Run with an environment that has torch (CPU), transformers 5 and gguf:

    python -m tests.golden_tools.make_goldens OUT_FOLDER [NAME ...]

Matrices are rounded to float16-exact values before the golden run. Same seed, same files.
"""

from __future__ import annotations

import argparse
import re
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.golden_tools.cases import CASES
from tests.golden_tools.rules import COMMON, CONTEXT, VOCAB, Case
from tests.support.bpe import MERGES, byte_tokens

SEED = 0
LENGTHS = (1, 11, 40)
N_GREEDY = 24
CONTROL = ("<|endoftext|>",)
EPSILONS = ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
FUSED = {"Dots1": "dots1", "Qwen2": "qwen2"}
"""Architectures that have names for what goes into one tensor."""
EMBEDDINGS = re.compile(r"embed_tokens|embed_in|word_embeddings|wte|wpe")
FINAL_NORM = re.compile(r"(model\.|gpt_neox\.|transformer\.)?(norm|final_layernorm|final_layer_norm|ln_f)\.weight")


def random_weights(model: torch.nn.Module, case: Case) -> None:
    """Wide enough that positions, windows and experts matter; matrices exact in float16."""
    for name, parameter in model.state_dict().items():
        rng = np.random.default_rng([SEED, zlib.crc32(f"{case.name}/{name}".encode())])
        if not parameter.shape:  # a constant of an activation
            continue
        values = rng.standard_normal(tuple(parameter.shape))
        is_norm = "norm" in name.rsplit(".", 2)[-2] or ".norms." in name or ".ln_" in name
        if is_norm and name.endswith("weight"):
            values = (0 if case.norm_plus_one else 1) + 0.25 * values
            # or a tied model would just repeat its input
            if FINAL_NORM.fullmatch(name):
                sign = rng.choice([-1.0, 1.0], values.shape)
                values = sign * (1 + values) - 1 if case.norm_plus_one else sign * values
        elif name.endswith(("bias", "_bias")):
            values = 0.25 * values
        elif "sinks" not in name and not EMBEDDINGS.search(name):
            fan_in = values.shape[1] if "experts" in name and case.arch == "gpt-oss" else values.shape[-1]
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 2.0 if name.endswith("gate.weight") else 1.0
            values = gain * values / np.sqrt(fan_in)
        if case.name == "bailingmoe" and "e_score_correction" in name:
            values = 0 * values
        values = values.astype(np.float16) if values.ndim > 1 and not is_norm else values
        parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def golden(model: Any) -> dict[str, np.ndarray]:
    """Logits of three sequences and a greedy path: of twelve, one that does not end (id 0) nor go round in circles and
    whose margins are wide."""

    def logits(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0].numpy()

    def greedy(prompt: np.ndarray) -> tuple[list[int], float]:
        ids, margin = prompt.tolist(), np.inf
        for _ in range(N_GREEDY):
            last = logits(np.array(ids))[-1]
            first, second = np.sort(last)[[-1, -2]]
            margin = min(margin, float(first - second))
            ids.append(int(last.argmax()))
        return ids[len(prompt) :], margin

    rng = np.random.default_rng(SEED)
    out: dict[str, np.ndarray] = {}
    for i, length in enumerate(LENGTHS):
        out[f"ids_{i}"] = rng.choice(VOCAB - 1, length, replace=False).astype(np.int32) + 1
        out[f"logits_{i}"] = logits(out[f"ids_{i}"])
    prompts = [rng.choice(VOCAB - 1, LENGTHS[1], replace=False) + 1 for _ in range(12)]
    paths = [greedy(p) for p in prompts]

    def worth(i: int) -> tuple[bool, bool, int, float]:
        path, margin = paths[i]
        return 0 not in path, margin > 0.04, min(len(set(path)), 12), margin

    best = max(range(12), key=worth)
    out["greedy_prompt"] = prompts[best].astype(np.int32)
    out["greedy_ids"] = np.array(paths[best][0], np.int32)
    print(f"  logit std {out['logits_2'].std():.2f}, margin {paths[best][1]:.3f}, {len(set(paths[best][0]))} ids")
    return out


def permute(data: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows (2, d/2) of each head become (d/2, 2)."""
    rows = data.reshape(n_heads, 2, data.shape[0] // n_heads // 2, *data.shape[1:])
    return rows.swapaxes(1, 2).reshape(data.shape)


def head_norms(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """StableLM keeps one norm per head; the file stacks them."""
    out, stacks = {}, {}
    for name, data in state.items():
        match = re.fullmatch(r"(.*_layernorm)\.norms\.(\d+)\.weight", name)
        if match:
            stacks.setdefault(f"{match[1]}.weight", {})[int(match[2])] = data
        else:
            out[name] = data
    return out | {name: np.stack([rows[i] for i in sorted(rows)]) for name, rows in stacks.items()}


def converted(model: Any, case: Case) -> dict[str, np.ndarray]:
    """GGUF name -> float32 array, in numpy order."""
    config = model.config
    arch = FUSED[case.model] if case.fused else case.arch
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers)
    out: dict[str, np.ndarray] = {}
    state = head_norms({name: p.numpy() for name, p in model.state_dict().items()})
    for source, value in state.items():
        for name, data in (case.rule(source, value) if case.rule else {source: value}).items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if case.permuted and re.search(r"[qk]_proj\.(weight|bias)$", name):
                heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                data = permute(data, heads)
            if case.norm_plus_one and name.endswith("norm.weight"):
                data = data + 1
            target = names.get_name(name, try_suffixes=(".weight", ".bias")) or names.get_name(name + ".weight")
            if target is None:
                raise SystemExit(f"{case.name}: no GGUF name for {name}")
            target = target if target.endswith((".weight", ".bias")) else target + ".weight"
            out[target] = np.ascontiguousarray(data, np.float32)
    for i in range(config.num_hidden_layers if case.fused else 0):
        for kind in ("weight", "bias"):
            if f"blk.{i}.attn_q.{kind}" in out:
                out[f"blk.{i}.attn_qkv.{kind}"] = np.concatenate([out.pop(f"blk.{i}.attn_{x}.{kind}") for x in "qkv"])
    return out | rope_tensors(config)


def rope_tensors(config: Any) -> dict[str, np.ndarray]:
    """Frequency factors that files carry as tensors: llama3's, and LongRoPE's two."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{k}.weight": np.array(rope[f"{k}_factor"], np.float32) for k in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wavelength = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, d, 2) / d)
    turns = rope["original_max_position_embeddings"] / wavelength
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)}


def metadata(model: Any, case: Case) -> dict[str, Any]:
    """Architecture keys and a byte-level vocabulary."""
    c = model.config
    rope = getattr(c, "rope_parameters", None) or {}
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    eps = getattr(c, "rms_norm_eps", None)
    norm = {"attention.layer_norm_rms_epsilon": eps}
    if eps is None:
        norm = {"attention.layer_norm_epsilon": next((getattr(c, k) for k in EPSILONS if hasattr(c, k)), 1e-5)}
    keys = {
        "block_count": c.num_hidden_layers,
        "context_length": CONTEXT,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "vocab_size": VOCAB,
        **({} if head_dim * c.num_attention_heads == c.hidden_size else {"attention.key_length": head_dim}),
        **({} if head_dim * c.num_attention_heads == c.hidden_size else {"attention.value_length": head_dim}),
        **norm,
        **case.keys,
    }
    tokens = [*CONTROL, *byte_tokens(), *(m.replace(" ", "") for m in MERGES)]
    assert len(tokens) == VOCAB
    return {f"{case.arch}.{k}": v for k, v in keys.items() if v is not None} | {
        **xielu(model),
        "general.name": f"golden-{case.name.replace('phi', 'p')}",  # llama.cpp wants Phi tokens of a "phi3"
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (VOCAB - 1),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def xielu(model: Any) -> dict[str, list[float]]:
    """Apertus: the numbers of each layer's activation, under keys without the architecture's prefix."""
    acts = [layer.mlp.act_fn for layer in model.model.layers] if "Apertus" in type(model).__name__ else []
    names = ("alpha_p", "alpha_n", "beta", "eps") if acts else ()
    return {f"xielu.{name}": [float(getattr(act, name).detach()) for act in acts] for name in names}


def write(path: Path, arch: str, keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Matrices as F16; norms, biases, sinks, routers and frequency factors as F32."""
    writer = gguf.GGUFWriter(path, arch)
    add = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in keys.items():
        getattr(writer, f"add_{add[type(value)]}")(key, value)
    for name, data in tensors.items():
        small = data.ndim < 2 or "norm" in name or "ffn_gate_inp" in name or name.endswith(".bias")
        small = small or name in ("position_embd.weight", "token_types.weight")
        writer.add_tensor(name, data if small else data.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build(case: Case) -> Any:
    """The random model, in float32 with plain attention."""
    config_class = getattr(transformers, f"{case.model}TextConfig", None) or getattr(
        transformers, f"{case.model}Config"
    )
    config = config_class(**{**COMMON, **case.config}, attn_implementation="eager")
    head = "LMHeadModel" if case.model == "GPT2" else "ForCausalLM"
    model = getattr(transformers, case.model + head)(config).float().eval()
    with torch.no_grad():
        random_weights(model, case)
        widen(model, case)
    return model


def widen(model: Any, case: Case) -> None:
    """Scale the final norm until the logits have a standard deviation near 3, so that greedy choices have margins."""
    ids = torch.arange(1, LENGTHS[2])[None]
    factor = 3 / model(ids, use_cache=False).logits.std()
    named = dict(model.named_parameters())
    name = next((name for name in named if FINAL_NORM.fullmatch(name)), "lm_head.weight")  # OLMo's norm has no weight
    weight, one = named[name], 1.0 if case.norm_plus_one else 0.0
    scaled = (weight + one) * factor - one
    weight.copy_(scaled.half().float() if scaled.ndim > 1 else scaled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    for case in CASES:
        if arguments.names and case.name not in arguments.names:
            continue
        print(case.name)
        model = build(case)
        folder = arguments.out / case.name
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / "golden.npz", **golden(model))
        path = folder / f"{case.name}-f16.gguf"
        write(path, case.arch, metadata(model, case), converted(model, case))
        print(f"  {path.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
