"""Apertus: RMS norms on each head of q and k, halves rotate; an MLP without a gate whose activation is xIELU (Huang and
Schlag 2024, arXiv 2411.13010), with its own numbers in each layer: for x > 0 p x^2 + beta x, else n (exp(x) - 1 - x) +
beta x. The file has p and n - beta before their softplus."""

from __future__ import annotations

import math
from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import Attention, Linear, RMSNorm
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["Apertus"]


class XieluMLP:
    """down(xielu(up x))."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int):
        self.b = t.backend
        self.ffn_up, self.ffn_down = Linear(t, "ffn_up", c.ffn_dim, c.dim), Linear(t, "ffn_down", c.dim, c.ffn_dim)
        self.beta, self.above, self.below = (c.per_layer[name][layer] for name in ("beta", "above", "below"))

    def __call__(self, x: Array) -> Array:
        h = self.ffn_up(x)
        y = self.b.add(self.b.scale(h, self.beta), self.b.activate("relu2", h), self.above)
        return self.ffn_down(self.b.add(y, self.b.activate("exp_rest", h), self.below))


class Block:
    """norm, attend, add; norm, MLP, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope, qk_norm=RMSNorm)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = XieluMLP(t, c, layer)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.ffn_norm(x)))


class Apertus(Decoder):
    """Arch `apertus`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False)
        beta = meta.numbers("xielu.beta", c.n_layers)
        above, below = (meta.numbers(f"xielu.alpha_{sign}", c.n_layers) for sign in "pn")
        numbers = {
            "beta": beta,
            "above": tuple(map(softplus, above)),
            "below": tuple(b + softplus(x) for b, x in zip(beta, below, strict=True)),
        }
        return replace(c, per_layer=numbers)


def softplus(x: float) -> float:
    """ln(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
