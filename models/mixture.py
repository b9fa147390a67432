"""Mixtures whose files say how experts are chosen and weighed: leading layers without experts, and an expert for every
token beside the chosen ones."""

from __future__ import annotations

from dataclasses import replace

from edgellm.backends.base import Array, RouteSpec
from edgellm.errors import UnsupportedModel
from edgellm.models.config import ModelConfig
from edgellm.models.layers import MLP, MoE
from edgellm.models.metadata import Metadata
from edgellm.models.tensors import Tensors

__all__ = ["MIXTURE_KEYS", "SharedMoE", "feed_forward", "mixture_config"]

MIXTURE_KEYS = ("expert_gating_func", "expert_group_count", "expert_weights_scale", "leading_dense_block_count")
MAX_GROUPS = 32
SCORINGS = ("", "softmax", "sigmoid", "softmax_topk")
"""By the numbers of `expert_gating_func`; 0: the file does not say."""


def mixture_config(meta: Metadata, c: ModelConfig, scoring: str) -> ModelConfig:
    """With what the file says of its experts. `scoring`: where it does not say. The shared expert's width is in the
    file, or that of as many experts as `expert_shared_count` says."""
    groups = meta.integer("expert_group_count", 1, high=MAX_GROUPS) or 1
    groups_used = (meta.integer("expert_group_used_count", groups, high=groups) or groups) if groups > 1 else 1
    size = c.n_experts // groups
    if c.n_experts % groups or (groups > 1 and (size < 2 or groups_used * size < c.n_experts_used)):
        raise UnsupportedModel(
            f"{meta.arch}.expert_group_count ({groups}, {groups_used} used) does not fit {c.n_experts} experts, "
            f"{c.n_experts_used} used"
        )
    shared = meta.integer("expert_shared_count", 0) * c.expert_ffn_dim
    return replace(
        c,
        expert_scoring=SCORINGS[meta.integer("expert_gating_func", 0, high=len(SCORINGS) - 1)] or scoring,
        expert_normalise=meta.flag("expert_weights_norm", False),
        expert_groups=groups,
        expert_groups_used=groups_used,
        expert_scale=meta.number("expert_weights_scale", 1.0) or 1.0,
        shared_ffn_dim=meta.integer("expert_shared_feed_forward_length", shared),
        dense_layers=meta.integer("leading_dense_block_count", 0),
    )


class SharedMoE:
    """The mix of the chosen experts, plus the shared expert where there is one."""

    def __init__(self, t: Tensors, c: ModelConfig):
        self.b = t.backend
        groups = c.expert_groups, c.expert_groups_used
        route = RouteSpec(c.n_experts_used, c.expert_scoring, c.expert_normalise, c.expert_scale, *groups)
        self.routed = MoE(t, c, route)
        self.shared = MLP(t, c.dim, c.shared_ffn_dim, "silu", suffix="_shexp") if c.shared_ffn_dim else None

    def __call__(self, x: Array) -> Array:
        y = self.routed(x)
        return self.b.add(y, self.shared(x)) if self.shared else y


def feed_forward(t: Tensors, c: ModelConfig, layer: int) -> MLP | SharedMoE:
    """What a layer feeds its rows through: an MLP in leading layers, experts in the others."""
    return MLP(t, c.dim, c.ffn_dim, "silu") if layer < c.dense_layers else SharedMoE(t, c)
