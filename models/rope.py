"""Rotary tables: inverse frequencies of plain, linear, YaRN, llama3 (factors as a tensor) and LongRoPE scaling.

Made once at load, in float64 rounded to float32 at the end; `Backend.rope` multiplies them by positions in float32.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edgellm.backends.base import RopeSpec
from edgellm.errors import UnsupportedModel
from edgellm.models.config import ModelConfig, RopeConfig
from edgellm.models.tensors import Tensors

__all__ = ["inverse_frequencies", "layer_ropes", "rope_spec"]

Doubles = npt.NDArray[np.float64]


def inverse_frequencies(rope: RopeConfig) -> Doubles:
    """base^(-2j / n_dims) for each pair j, scaled as the file says: float64 (n_dims / 2,)."""
    plain = rope.base ** -(np.arange(0, rope.n_dims, 2) / rope.n_dims)
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "yarn":
        keep = _yarn_kept(rope) * rope.extrapolation
        return plain * keep + plain / rope.factor * (1 - keep)
    return plain


def _yarn_kept(rope: RopeConfig) -> Doubles:
    """How far each pair keeps its own frequency (YaRN, Peng et al. 2023, section 3.2): 1 for pairs that turn more
    than beta_fast times in the original context, 0 below beta_slow turns, a ramp over the pair's index between."""

    def pair_of(turns: float) -> float:
        return rope.n_dims * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.n_dims - 1)
    ramp = (np.arange(rope.n_dims // 2) - low) / max(high - low, 0.001)
    kept: Doubles = 1 - np.clip(ramp, 0, 1)
    return kept


def rope_spec(rope: RopeConfig, divisors: list[npt.NDArray[np.float32]] | None = None) -> RopeSpec:
    """`divisors`: per variant, factors (n_dims / 2,) that divide the inverse frequencies."""
    plain = inverse_frequencies(rope)
    tables = np.stack([plain / d.astype(np.float64) for d in divisors]) if divisors else plain[None]
    magnitude = rope.attn_factor
    if rope.scaling == "yarn" and rope.factor > 1:
        magnitude *= rope.yarn_magnitude or 0.1 * math.log(rope.factor) + 1
    return RopeSpec(rope.n_dims, rope.adjacent, tables.astype(np.float32), np.full(len(tables), magnitude, np.float32))


def _divisors(tensors: Tensors, name: str, half: int) -> npt.NDArray[np.float32]:
    values = tensors.array(name, half)
    if not (values > 0).all():  # infinity is sound: such a pair is never turned
        raise UnsupportedModel(f"tensor {name} must hold numbers above 0, which frequencies are divided by")
    return values


def layer_ropes(config: ModelConfig, tensors: Tensors) -> list[RopeSpec | None]:
    """The table of each layer: None where it has no rotation, the local one in windowed layers that have their own."""
    rope, half = config.rope, config.rope.n_dims // 2
    names = ["rope_freqs.weight"]
    if rope.scaling == "longrope":
        names = ["rope_factors_short.weight", "rope_factors_long.weight"]
    found = [_divisors(tensors, name, half) for name in names if name in tensors]
    ones = np.ones(half, np.float32)
    divisors = found if len(found) == len(names) else [ones] * len(names)
    main = rope_spec(rope, divisors)
    local = rope_spec(config.rope_local) if config.rope_local else main
    windows = config.windows or (0,) * config.n_layers
    rotates = config.rope_layers or (True,) * config.n_layers
    return [(local if window else main) if on else None for window, on in zip(windows, rotates, strict=True)]
