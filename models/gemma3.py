"""Gemma 3: Gemma 2's block with norms on q and k instead of soft caps; every sixth layer full, the others windowed.

Full layers rotate with `rope.freq_base` and its scaling, windowed ones with `rope.freq_base_swa` and none. The file
says neither the pattern nor the attention scale (1/sqrt(head_dim), but 1/sqrt(dim / heads) in the 27B model, which has
62 layers).
"""

from __future__ import annotations

import math
from dataclasses import replace

from edgellm.backends.base import Array, Batch, KVPages, RopeSpec
from edgellm.models.config import ModelConfig
from edgellm.models.decoder import Decoder
from edgellm.models.layers import MLP, Attention, RMSNorm
from edgellm.models.metadata import Metadata, base_config, layer_windows, local_rope
from edgellm.models.tensors import Tensors

__all__ = ["Gemma3"]


class Block:
    """norm, attend, norm, add; norm, MLP, norm, add."""

    def __init__(self, t: Tensors, c: ModelConfig, layer: int, rope: RopeSpec | None):
        self.b = t.backend
        self.attn_norm = RMSNorm(t, "attn_norm", c.norm_eps, c.dim)
        self.attn = Attention(t, c, layer, rope, qk_norm=RMSNorm)
        self.post_attention_norm = RMSNorm(t, "post_attention_norm", c.norm_eps, c.dim)
        self.ffn_norm = RMSNorm(t, "ffn_norm", c.norm_eps, c.dim)
        self.ffn = MLP(t, c.dim, c.ffn_dim, "gelu_tanh")
        self.post_ffw_norm = RMSNorm(t, "post_ffw_norm", c.norm_eps, c.dim)

    def attend(self, x: Array, batch: Batch, kv: KVPages) -> Array:
        h = self.attn(self.attn_norm(x), batch, kv)
        return self.b.add(x, self.post_attention_norm(h))

    def feed(self, x: Array) -> Array:
        return self.b.add(x, self.post_ffw_norm(self.ffn(self.ffn_norm(x))))


class Gemma3(Decoder):
    """Arch `gemma3` (the text model)."""

    block = Block

    @staticmethod
    def read_config(meta: Metadata) -> ModelConfig:
        c = base_config(meta, adjacent=False, computes=("attention.causal",) if meta.arch != "gemma3" else ())
        # Files by Ollama's converter have names of their own for the two bases.
        key = "rope.freq_base" if meta.has("rope.freq_base") else "rope.global.freq_base"
        rope = replace(c.rope, base=meta.number(key, c.rope.base, low=1.001))
        local = meta.number("rope.local.freq_base", 10000.0, low=1.001)
        return replace(
            c,
            embedding_scale=math.sqrt(c.dim),
            windows=layer_windows(meta, c.n_layers, period=6),
            rope=rope,
            rope_local=local_rope(meta, rope, local, scaled=False),
            attn_scale=1 / math.sqrt(c.dim / c.n_heads if c.n_layers == 62 else c.k_dim),
            logit_softcap=meta.number("final_logit_softcapping", 0.0, low=0),
        )
