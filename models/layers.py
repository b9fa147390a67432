"""What architectures are put together from: small classes that hold weights and call backend ops.

`x` is (n_tokens, dim) throughout. Attribute names are GGUF tensor names. Which kind of weight, cache or machine it is
nobody here knows.
"""

from __future__ import annotations

import math

from edgellm.backends.base import Array, AttentionSpec, Batch, KVPages, RopeSpec, RouteSpec, Weight
from edgellm.models.config import ModelConfig
from edgellm.models.tensors import Tensors

__all__ = ["MLP", "Attention", "Experts", "GatedExpert", "LayerNorm", "Linear", "MoE", "RMSNorm"]


class Linear:
    """x W^T + b, the bias where the file has one."""

    def __init__(self, t: Tensors, name: str, n_out: int, n_in: int):
        self.b = t.backend
        self.weight = t.weight(f"{name}.weight", n_out, n_in)
        self.bias = t.optional(f"{name}.bias", n_out)

    def __call__(self, x: Array) -> Array:
        return self.b.linear(x, self.weight, self.bias)


class FusedPart(Linear):
    """A row range of a fused tensor (q of attn_qkv, gate of ffn_up)."""

    def __init__(self, t: Tensors, weight: Weight, bias: Weight | None):
        self.b, self.weight, self.bias = t.backend, weight, bias


def split(t: Tensors, name: str, sizes: tuple[int, ...], n_in: int) -> list[Linear]:
    """A fused product as separate ones that share the file's rows."""
    weights = t.rows(f"{name}.weight", sizes, n_in)
    biases = t.rows(f"{name}.bias", sizes) if f"{name}.bias" in t else (None,) * len(sizes)
    return [FusedPart(t, w, bias) for w, bias in zip(weights, biases, strict=True)]


class RMSNorm:
    """x / rms(x) * weight over the last axis; a (heads, d) weight norms each head with its own row."""

    def __init__(self, t: Tensors, name: str, eps: float, *shape: int):
        self.b, self.eps = t.backend, eps
        self.weight = t.weight(f"{name}.weight", *shape)

    def __call__(self, x: Array) -> Array:
        return self.b.rms_norm(x, self.weight, self.eps)


class LayerNorm:
    """(x - mean) / std * weight + bias over the last axis; the bias where the file has one."""

    def __init__(self, t: Tensors, name: str, eps: float, *shape: int):
        self.b, self.eps = t.backend, eps
        self.weight = t.weight(f"{name}.weight", *shape)
        self.bias = t.optional(f"{name}.bias", *shape)

    def __call__(self, x: Array) -> Array:
        return self.b.layer_norm(x, self.weight, self.bias, self.eps)


class Attention:
    """Grouped-query attention over the paged cache, with rotary embedding and norms on q and k where given.

    `qk_norm` with `qk_norm_over`: "head" (one weight for all heads), "heads" (a row per head), "row" (whole q and k);
    `rope_first`: heads are normed behind the rotation, not before it. `gated`: what the heads give is multiplied by
    sigmoid(attn_gate x).
    """

    def __init__(
        self,
        t: Tensors,
        c: ModelConfig,
        layer: int,
        rope: RopeSpec | None,
        qk_norm: type[RMSNorm] | type[LayerNorm] | None = None,
        qk_norm_over: str = "head",
        rope_first: bool = False,
        gated: bool = False,
    ):
        self.b, self.rope = t.backend, rope
        self.n_heads, self.n_kv_heads, self.k_dim, self.v_dim = c.n_heads, c.n_kv_heads, c.k_dim, c.v_dim
        n_q, n_k, n_v = c.n_heads * c.k_dim, c.n_kv_heads * c.k_dim, c.n_kv_heads * c.v_dim
        if "attn_qkv.weight" in t:
            self.attn_q, self.attn_k, self.attn_v = split(t, "attn_qkv", (n_q, n_k, n_v), c.dim)
        else:
            self.attn_q = Linear(t, "attn_q", n_q, c.dim)
            self.attn_k = Linear(t, "attn_k", n_k, c.dim)
            self.attn_v = Linear(t, "attn_v", n_v, c.dim)
        self.attn_output = Linear(t, "attn_output", c.dim, c.n_heads * c.v_dim)
        self.attn_gate = Linear(t, "attn_gate", c.n_heads * c.v_dim, c.dim) if gated else None
        self.norm_over, self.rope_first = qk_norm_over if qk_norm else "", rope_first
        if qk_norm:
            q_shape = {"head": (c.k_dim,), "heads": (c.n_heads, c.k_dim), "row": (n_q,)}[qk_norm_over]
            k_shape = {"head": (c.k_dim,), "heads": (c.n_kv_heads, c.k_dim), "row": (n_k,)}[qk_norm_over]
            self.attn_q_norm = qk_norm(t, "attn_q_norm", c.norm_eps, *q_shape)
            self.attn_k_norm = qk_norm(t, "attn_k_norm", c.norm_eps, *k_shape)
        self.spec = AttentionSpec(
            scale=c.attn_scale or 1 / math.sqrt(c.k_dim),
            window=c.windows[layer] if c.windows else 0,
            softcap=c.attn_softcap,
            sinks=t.optional("attn_sinks.weight", c.n_heads),
            causal=c.causal,
        )

    def __call__(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        n = x.shape[0]
        parts = (self.attn_q, self.attn_k, self.attn_v)
        q, k, v = self.b.linears(x, [part.weight for part in parts], [part.bias for part in parts])
        if self.norm_over == "row":
            q, k = self.attn_q_norm(q), self.attn_k_norm(k)
        q = q.reshape(n, self.n_heads, self.k_dim)
        k = k.reshape(n, self.n_kv_heads, self.k_dim)
        v = v.reshape(n, self.n_kv_heads, self.v_dim)
        normed = self.norm_over in ("head", "heads")
        if normed and not self.rope_first:
            q, k = self.attn_q_norm(q), self.attn_k_norm(k)
        if self.rope is not None:
            q, k = self.b.rope(q, batch, self.rope), self.b.rope(k, batch, self.rope)
        if normed and self.rope_first:
            q, k = self.attn_q_norm(q), self.attn_k_norm(k)
        self.b.store_kv(kv, k, v, batch)
        out = self.b.attention(q, kv, batch, self.spec).reshape(n, self.n_heads * self.v_dim)
        if self.attn_gate is not None:
            out = self.b.activate("sigmoid", self.attn_gate(x), out)
        return self.attn_output(out)


class MLP:
    """down(f(gate x) * up x); without a gate down(f(up x)). `fused`: ffn_up holds the gate's rows, then up's.
    `suffix`: "_shexp" for the shared expert of a mixture."""

    def __init__(
        self, t: Tensors, dim: int, hidden: int, kind: str, gated: bool = True, fused: bool = False, suffix: str = ""
    ):
        self.b, self.kind = t.backend, kind
        self.ffn_gate: Linear | None = None
        if fused:
            self.ffn_gate, self.ffn_up = split(t, f"ffn_up{suffix}", (hidden, hidden), dim)
        else:
            self.ffn_gate = Linear(t, f"ffn_gate{suffix}", hidden, dim) if gated else None
            self.ffn_up = Linear(t, f"ffn_up{suffix}", hidden, dim)
        self.ffn_down = Linear(t, f"ffn_down{suffix}", dim, hidden)

    def __call__(self, x: Array) -> Array:
        if self.ffn_gate is None:
            return self.ffn_down(self.b.activate(self.kind, self.ffn_up(x)))
        if self.ffn_gate.bias is None and self.ffn_up.bias is None and self.ffn_down.bias is None:
            return self.b.gated_mlp(x, self.ffn_gate.weight, self.ffn_up.weight, self.ffn_down.weight, self.kind)
        return self.ffn_down(self.b.activate(self.kind, self.ffn_gate(x), self.ffn_up(x)))


class Experts:
    """One product per chosen expert: (n, k) or (n, n_used, k) -> (n, n_used, n_out)."""

    def __init__(self, t: Tensors, name: str, n_experts: int, n_out: int, n_in: int):
        self.b = t.backend
        self.weight = t.weight(f"{name}.weight", n_experts, n_out, n_in)
        self.bias = t.optional(f"{name}.bias", n_experts, n_out)

    def __call__(self, x: Array, ids: Array) -> Array:
        return self.b.expert_linear(x, self.weight, ids, self.bias)


class MoE:
    """Mixture of experts: a router picks `route.n_used` gated MLPs per token and mixes their outputs."""

    def __init__(self, t: Tensors, c: ModelConfig, route: RouteSpec, kind: str = "silu"):
        self.b, self.route, self.kind = t.backend, route, kind
        self.ffn_gate_inp = Linear(t, "ffn_gate_inp", c.n_experts, c.dim)
        self.exp_probs_b = t.optional("exp_probs_b.bias", c.n_experts)
        self.ffn_gate_exps = Experts(t, "ffn_gate_exps", c.n_experts, c.expert_ffn_dim, c.dim)
        self.ffn_up_exps = Experts(t, "ffn_up_exps", c.n_experts, c.expert_ffn_dim, c.dim)
        self.ffn_down_exps = Experts(t, "ffn_down_exps", c.n_experts, c.dim, c.expert_ffn_dim)

    def __call__(self, x: Array) -> Array:
        ids, weights = self.b.route(self.ffn_gate_inp(x), self.route, self.exp_probs_b)
        h = self.b.activate(self.kind, self.ffn_gate_exps(x, ids), self.ffn_up_exps(x, ids))
        return self.b.combine(self.ffn_down_exps(h, ids), weights)


class GatedExpert:
    """A shared expert: sigmoid(gate x) * mlp(x), with one gate value per token."""

    def __init__(self, t: Tensors, name: str, dim: int, mlp: MLP):
        self.b, self.mlp = t.backend, mlp
        self.gate = Linear(t, name, 1, dim)

    def __call__(self, x: Array) -> Array:
        # A router with one expert to choose from gives the sigmoid as that expert's weight.
        _, weights = self.b.route(self.gate(x), RouteSpec(1, "sigmoid", normalise=False))
        return self.b.combine(self.mlp(x).reshape(x.shape[0], 1, x.shape[1]), weights)
