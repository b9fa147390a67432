"""Reading a model's constants from GGUF metadata: every value checked, every complaint naming its key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgellm.errors import UnsupportedModel
from edgellm.models.config import ModelConfig, RopeConfig

__all__ = ["Metadata", "base_config", "layer_windows", "local_rope"]

MAX_SIZE = 1 << 24
"""No width, layer count or expert count of a real model comes near this; a damaged file's often goes past it."""
MAX_LAYERS = 4096
MAX_CONTEXT = 1 << 31
POOLING = ("", "mean", "cls", "last", "")
"""By the numbers of `pooling_type`: unsaid, three ways, and rank (a classifier on top, which we do not run)."""
NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.clamp_kqv": (0,),
    "attention.key_length_mla": (0,),
    "attention.key_length_swa": (),
    "attention.kv_lora_rank": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "expert_gating_func": (0, 1, 3),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "moe_every_n_layers": (0,),
    "rope.dimension_count_swa": (),
    "rope.scaling.alpha": (0,),
    "router_logit_softcapping": (0,),
    "ssm.state_size": (0,),
}
"""Keys of other architectures that change what is computed, with the values that change nothing: with another value a
file is a variant that only a class runs which names the key."""


class Metadata:
    """Metadata with the architecture's prefix put before each key."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values
        arch = values.get("general.architecture")
        if not isinstance(arch, str) or not arch:
            raise UnsupportedModel("the file names no architecture (metadata key general.architecture)")
        self.arch = arch

    def has(self, key: str) -> bool:
        """Whether the key is in the file."""
        return f"{self.arch}.{key}" in self.values

    def integer(self, key: str, default: int | None = None, low: int = 0, high: int = MAX_SIZE) -> int:
        """A whole number in low..high, or the same number for every layer as an array."""
        value = self._get(key, default)
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0:
            if any(x != value[0] for x in value):
                raise UnsupportedModel(f"{self.arch}.{key} differs from layer to layer, which is not supported")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise UnsupportedModel(
                f"{self.arch}.{key} must be a whole number from {low} to {high}, not {_short(value)}"
            )
        return value

    def number(self, key: str, default: float | None = None, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number in low..high."""
        value = self._get(key, default)
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not ok or not low <= value <= high:
            raise UnsupportedModel(f"{self.arch}.{key} must be a number from {low} to {high}, not {_short(value)}")
        return float(value)

    def numbers(self, key: str, n: int) -> tuple[float, ...]:
        """A finite number for each of n layers; `key` has no prefix."""
        value = self.values.get(key)
        if value is None or isinstance(value, (str, int, float)) or len(value) != n:
            raise UnsupportedModel(f"{self.arch} models of {n} layers need {n} numbers under the metadata key {key}")
        if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in value):
            raise UnsupportedModel(f"the metadata key {key} must hold finite numbers")
        return tuple(float(x) for x in value)

    def text(self, key: str, default: str, allowed: Sequence[str]) -> str:
        """One of a few words."""
        value = self._get(key, default)
        if value not in allowed:
            raise UnsupportedModel(f"{self.arch}.{key} must be one of {', '.join(allowed)}, not {_short(value)}")
        return str(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{self.arch}.{key} must be true or false, not {_short(value)}")
        return value

    def flags(self, key: str, n: int) -> tuple[bool, ...] | None:
        """One flag per layer, or None when the key is absent or not an array."""
        value = self.values.get(f"{self.arch}.{key}")
        if value is None or isinstance(value, (str, int, float)):
            return None
        if len(value) != n:
            raise UnsupportedModel(f"{self.arch}.{key} has {len(value)} entries for {n} layers")
        return tuple(bool(x) for x in value)

    def vocab_size(self) -> int:
        """Entries of the vocabulary; 0 where the file has neither tokens nor a size."""
        tokens = self.values.get("tokenizer.ggml.tokens")
        if tokens is not None and not isinstance(tokens, str) and hasattr(tokens, "__len__"):
            return len(tokens)
        return self.integer("vocab_size", 0)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(f"{self.arch}.{key}", default)
        if value is None:
            raise UnsupportedModel(f"the file has no metadata key {self.arch}.{key}, which {self.arch} models need")
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _rope_config(meta: Metadata, k_dim: int, context_length: int, adjacent: bool) -> RopeConfig:
    """The main rotary table."""
    n_dims = meta.integer("rope.dimension_count", k_dim, low=2, high=k_dim)
    if n_dims % 2:
        raise UnsupportedModel(f"{meta.arch}.rope.dimension_count must be even, not {n_dims}")
    factor_key = "rope.scaling.factor" if meta.has("rope.scaling.factor") else "rope.scale_linear"
    factor = meta.number(factor_key, 1.0, low=0) or 1.0
    return RopeConfig(
        n_dims=n_dims,
        base=meta.number("rope.freq_base", 10000.0, low=1.001),
        adjacent=adjacent,
        scaling=meta.text(
            "rope.scaling.type", "linear" if factor != 1.0 else "none", ("none", "linear", "yarn", "longrope")
        ),
        factor=factor,
        original_context=meta.integer("rope.scaling.original_context_length", 0, high=MAX_CONTEXT) or context_length,
        attn_factor=meta.number("rope.scaling.attn_factor", 1.0, low=0),
        beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0, low=1e-3),
        beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0, low=1e-3),
        extrapolation=meta.number("rope.scaling.yarn_ext_factor", 1.0, low=0),
        yarn_magnitude=meta.number("rope.scaling.yarn_attn_factor", 0.0, low=0),
    )


def base_config(
    meta: Metadata, *, adjacent: bool, layer_norm: bool = False, computes: tuple[str, ...] = (), **constants: Any
) -> ModelConfig:
    """What all architectures share, under the keys they share. `constants`: fields the architecture sets itself;
    `computes`: keys of `NEUTRAL` that it reads.

    Raises UnsupportedModel naming the key that is missing, out of range or of a wrong type.
    """
    refuse_variants(meta, computes)
    dim = meta.integer("embedding_length", low=1)
    n_heads = meta.integer("attention.head_count", low=1)
    n_kv_heads = meta.integer("attention.head_count_kv", n_heads, low=1, high=n_heads)
    if n_heads % n_kv_heads:
        raise UnsupportedModel(
            f"{meta.arch}.attention.head_count ({n_heads}) must be a multiple of "
            f"{meta.arch}.attention.head_count_kv ({n_kv_heads})"
        )
    if not meta.has("attention.key_length") and dim % n_heads:
        raise UnsupportedModel(
            f"{meta.arch}.embedding_length ({dim}) must be a multiple of {meta.arch}.attention.head_count ({n_heads}) "
            "where attention.key_length is absent"
        )
    k_dim = meta.integer("attention.key_length", dim // n_heads, low=2)
    context_length = meta.integer("context_length", low=1, high=MAX_CONTEXT)
    eps_key = "attention.layer_norm_epsilon" if layer_norm else "attention.layer_norm_rms_epsilon"
    n_blocks = meta.integer("block_count", low=1, high=MAX_LAYERS)
    skipped = meta.integer("nextn_predict_layers", 0, high=n_blocks - 1)
    values: dict[str, Any] = {
        "arch": meta.arch,
        "n_layers": n_blocks - skipped,
        "skipped_layers": skipped,
        "dim": dim,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "k_dim": k_dim,
        "v_dim": meta.integer("attention.value_length", k_dim, low=1),
        "ffn_dim": meta.integer("feed_forward_length", 0),
        "vocab_size": meta.vocab_size(),
        "context_length": context_length,
        "norm_eps": meta.number(eps_key, low=0, high=1),
        "rope": _rope_config(meta, k_dim, context_length, adjacent),
        "n_experts": meta.integer("expert_count", 0),
        "pooling": POOLING[meta.integer("pooling_type", 0, high=len(POOLING) - 1)],
    }
    if values["n_experts"]:
        values["n_experts_used"] = meta.integer("expert_used_count", low=1, high=values["n_experts"])
        values["expert_ffn_dim"] = meta.integer("expert_feed_forward_length", values["ffn_dim"])
    return ModelConfig(**{**values, **constants})


def refuse_variants(meta: Metadata, computes: tuple[str, ...] = ()) -> None:
    """Raises UnsupportedModel naming the first key that asks for something the class does not compute."""
    for key, neutral in NEUTRAL.items():
        if key not in computes and meta.has(key) and meta.number(key) not in neutral:
            raise UnsupportedModel(
                f"{meta.arch}.{key} = {meta.number(key):g}: a variant of {meta.arch} that is not supported"
            )
    key = "attention.causal"
    if key not in computes and not meta.flag(key, True):
        raise UnsupportedModel(
            f"{meta.arch}.{key} = false: a variant of {meta.arch} that sees later tokens is not supported"
        )


def local_rope(meta: Metadata, rope: RopeConfig, base: float, scaled: bool = True) -> RopeConfig | None:
    """The table of windowed layers: `rope.freq_base_swa`, else `base`; with the main table's scaling or none. None when
    it is the main table."""
    base = meta.number("rope.freq_base_swa", base, low=1.001)
    if scaled:
        return replace(rope, base=base) if base != rope.base else None
    return RopeConfig(n_dims=rope.n_dims, base=base, adjacent=rope.adjacent)


def layer_windows(meta: Metadata, n_layers: int, period: int, default: int = 0) -> tuple[int, ...]:
    """Window of each layer, 0 for full attention. `default`: the window where the file has no
    `attention.sliding_window`; with 0 all layers are full then.

    Which layers slide: as the file says (`attention.sliding_window_pattern`: a flag per layer, or a period), else every
    `period`-th layer is full and the others slide; period 0: all slide.
    """
    window = meta.integer("attention.sliding_window", default, high=MAX_CONTEXT)
    key = "attention.sliding_window_pattern"
    slides = meta.flags(key, n_layers)
    if slides is None:
        period = meta.integer(key, period, high=MAX_LAYERS)
        slides = tuple(not period or (i + 1) % period != 0 for i in range(n_layers))
    return tuple(window if s else 0 for s in slides) if window else ()
