"""Nomic's second encoder: Nomic's block with biases and MLPs without a gate (GELU); in every second layer, from the
second on, experts of that kind without biases, softmax over all, the chosen weights as they are."""

from __future__ import annotations

from edgellm.backends.base import Array, RouteSpec
from edgellm.models import nomic_bert
from edgellm.models.config import ModelConfig
from edgellm.models.layers import MLP, Experts, Linear
from edgellm.models.metadata import Metadata, base_config
from edgellm.models.tensors import Tensors

__all__ = ["NomicBertMoE"]


class PlainMoE:
    """The chosen experts' down(gelu(up x)), mixed."""

    def __init__(self, t: Tensors, c: ModelConfig):
        self.b, self.route = t.backend, RouteSpec(c.n_experts_used, normalise=False)
        self.ffn_gate_inp = Linear(t, "ffn_gate_inp", c.n_experts, c.dim)
        self.ffn_up_exps = Experts(t, "ffn_up_exps", c.n_experts, c.expert_ffn_dim, c.dim)
        self.ffn_down_exps = Experts(t, "ffn_down_exps", c.n_experts, c.dim, c.expert_ffn_dim)

    def __call__(self, x: Array) -> Array:
        ids, weights = self.b.route(self.ffn_gate_inp(x), self.route)
        h = self.b.activate("gelu", self.ffn_up_exps(x, ids))
        return self.b.combine(self.ffn_down_exps(h, ids), weights)


class Block(nomic_bert.Block):
    """attend, add, norm; MLP or experts, add, norm."""

    def feed_forward(self, t: Tensors, c: ModelConfig, layer: int) -> MLP | PlainMoE:
        period = int(c.extra["moe_period"])
        return PlainMoE(t, c) if period and layer % period == 1 else MLP(t, c.dim, c.ffn_dim, "gelu", gated=False)


class NomicBertMoE(nomic_bert.NomicBert):
    """Arch `nomic-bert-moe`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        """The architecture's constants from a file's metadata."""
        extra = {"moe_period": float(meta.integer("moe_every_n_layers", 0))}
        c = base_config(
            meta, adjacent=False, layer_norm=True, computes=("attention.causal", "moe_every_n_layers"), extra=extra
        )
        return nomic_bert.nomic_config(meta, c)
