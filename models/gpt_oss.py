"""gpt-oss: attention sinks (one more logit per head, without a value), biases everywhere, clamped SwiGLU experts whose
weights are a softmax over the chosen ones; every other layer windowed; YaRN whose ramp is not rounded to whole pairs.

The norm before the experts is called `post_attention_norm` in the file.
"""

from __future__ import annotations

from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec, RouteSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import Attention, MoE, RMSNorm
from edgellm.models.metadata import Metadata, base_config, layer_windows, local_rope
from edgellm.models.tensors import Tensors

__all__ = ["GptOss"]


class Block:
    """norm, attend, add; norm, experts, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope)
        self.post_attention_norm = RMSNorm(t, "post_attention_norm", c.norm_eps, c.dim)
        self.ffn = MoE(t, c, RouteSpec(c.n_experts_used, "softmax_topk", normalise=False), "swiglu_oai")

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        return self.b.add(x, self.attn(self.attn_norm(x), batch, kv))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.ffn(self.post_attention_norm(x)))


class GptOss(Decoder):
    """Arch `gpt-oss`."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False)
        rope = replace(c.rope, whole_pairs=False)
        windows = layer_windows(meta, c.n_layers, period=2)
        return replace(c, windows=windows, rope=rope, rope_local=local_rope(meta, rope, rope.base))
