"""What a GGUF file's metadata says about a model, as plain data. Imports nothing of ours but L0: the planner and the
engine read shapes, windows and cache kinds from here without loading a backend."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CacheGroup", "ModelConfig", "RopeConfig"]


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table. `kind`: "full" or "window" (to come: "recurrent", a fixed-size state)."""

    kind: str
    layers: tuple[int, ...]
    window: int = 0
    """Positions a row sees, itself included; 0 for full attention."""


@dataclass(frozen=True)
class RopeConfig:
    """One rotary table: base, scaling and dimensions as the file (or the architecture) gives them."""

    n_dims: int
    base: float = 10000.0
    adjacent: bool = True
    scaling: str = "none"
    """"none", "linear", "yarn" or "longrope"; llama3 factors come as the tensor `rope_freqs.weight`."""
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    extrapolation: float = 1.0
    yarn_magnitude: float = 0.0
    """Factor on cos and sin under YaRN; 0: 0.1 ln(factor) + 1."""
    whole_pairs: bool = True
    """YaRN: whether the ends of the ramp are rounded outwards to whole pairs (gpt-oss: not)."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one model. Per-layer tuples have n_layers entries."""

    arch: str
    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    k_dim: int
    """head_dim of q and k."""
    v_dim: int
    ffn_dim: int
    vocab_size: int
    context_length: int
    """Trained length."""
    position_table: bool = field(default=False, kw_only=True)
    """Positions come from a table of `context_length` rows: there is nothing to compute with behind its end."""
    norm_eps: float
    rope: RopeConfig
    rope_local: RopeConfig | None = None
    """Table of windowed layers, where it differs (gemma3)."""
    windows: tuple[int, ...] = ()
    """Window per layer, 0 = full attention."""
    rope_layers: tuple[bool, ...] = ()
    """False for layers without rotary embedding (NoPE)."""
    attn_scale: float = 0.0
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    n_experts: int = 0
    n_experts_used: int = 0
    expert_ffn_dim: int = 0
    expert_scoring: str = "softmax"
    """How a router scores, as in `backends.base.RouteSpec`; so the next four."""
    expert_normalise: bool = True
    expert_scale: float = 1.0
    expert_groups: int = 1
    expert_groups_used: int = 1
    shared_ffn_dim: int = 0
    """Width of the expert that every token takes; 0: there is none."""
    dense_layers: int = 0
    """First layers that have an MLP where the others have experts."""
    skipped_layers: int = 0
    """Layers behind the last one that guess further tokens (MTP): in the file, never run."""
    causal: bool = True
    pooling: str = ""
    """"", "mean", "cls" or "last": how embeddings are pooled where the file says so."""
    extra: dict[str, float] = field(default_factory=dict)
    per_layer: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Constants that differ from layer to layer."""

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Layers grouped by window: one block table each, full attention first. An encoder's windows need no table of
        their own: its texts come whole."""
        windows = (self.windows if self.causal else ()) or (0,) * self.n_layers
        return tuple(
            CacheGroup("window" if w else "full", tuple(i for i, x in enumerate(windows) if x == w), w)
            for w in sorted(set(windows))
        )

    def rope_variant(self, total_len: int) -> int:
        """Which rotary table a request uses that may grow to `total_len` tokens (prompt + max_tokens): LongRoPE has a
        short (0) and a long (1) one. Chosen once per request, for `Batch.rope_variants`, and part of a prefix's key."""
        return int(self.rope.scaling == "longrope" and total_len > self.rope.original_context > 0)

    def skips(self, tensor: str) -> bool:
        """Whether a tensor of the file belongs to a layer that is never run."""
        return tensor.startswith(tuple(f"blk.{self.n_layers + i}." for i in range(self.skipped_layers)))

    def group_of(self, layer: int) -> int:
        """Index into `cache_groups` of a layer."""
        return next(g for g, group in enumerate(self.cache_groups) if layer in group.layers)
