"""The op set that models are written in. `reference.py` is its definition in numpy; other backends must agree with it.

An `Array` is whatever a backend computes with (numpy array, MLX array, a handle on a tape). Model code may read its
`.shape` and call `.reshape(*shape)` on it; everything else goes through the backend. All activations are float32.
Ops are pure unless they say otherwise: they return a new Array and leave their inputs alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgellm.errors import UnsupportedModel
from edgellm.quants import GGMLType, QTensor

__all__ = [
    "Array",
    "AttentionSpec",
    "Backend",
    "Batch",
    "GGMLType",
    "KVPages",
    "KVSpec",
    "Pass",
    "QTensor",
    "RopeSpec",
    "RouteSpec",
    "Weight",
]

Array = Any
Weight = Any  # what Backend.load returns: opaque to models, but it has `.shape`
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """One ragged step over several sequences: n_tokens rows, in sequence order, positions rising within a sequence."""

    ids: Int32Array
    """Token ids, int32 (n_tokens,)."""
    positions: Int32Array
    """Position of each token in its own sequence, int32 (n_tokens,)."""
    seq_starts: Int32Array
    """Rows seq_starts[s] .. seq_starts[s + 1] belong to sequence s, int32 (n_seqs + 1,)."""
    context_lens: Int32Array
    """Tokens of each sequence that are in the cache after this step (last position + 1), int32 (n_seqs,)."""
    block_tables: tuple[Int32Array, ...]
    """One table per cache group, int32 (n_seqs, max_blocks): block of positions [i * block_size, (i + 1) * block_size).
    Entries behind a window, and entries past the end, are 0 (the null block) and never read."""
    output_rows: Int32Array
    """Rows whose logits are wanted, rising, int32 (n_out,)."""
    rope_variants: Int32Array
    """Which frequency table of the RopeSpec each row uses (LongRoPE: 0 short, 1 long), int32 (n_tokens,)."""

    @property
    def n_tokens(self) -> int:
        """Rows in this step."""
        return len(self.ids)

    @property
    def n_seqs(self) -> int:
        """Sequences in this step."""
        return len(self.context_lens)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `n_dims` of each head. Angle = position * inv_freq in float32; cos and sin are
    multiplied by `magnitude`. `adjacent`: pairs (2j, 2j+1) rotate; otherwise halves (j, j + n_dims/2)."""

    n_dims: int
    adjacent: bool
    inv_freq: npt.NDArray[np.float32]
    """float32 (n_variants, n_dims / 2)."""
    magnitude: npt.NDArray[np.float32]
    """float32 (n_variants,)."""


@dataclass(frozen=True)
class AttentionSpec:
    """softmax(softcap(scale * q.k)) v over positions max(0, p - window + 1) .. p (all when window is 0).

    `softcap` c > 0: c * tanh(score / c) before the mask. `sinks` (Weight of n_heads float32): one more logit per head
    that takes probability and gives no value. `causal` False (encoders): rows also see what comes after them, to the
    end of their sequence, or with a window to position p + window - 1."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Weight | None = None
    causal: bool = True


@dataclass(frozen=True)
class RouteSpec:
    """How a router picks experts: `n_used` highest scores; `scoring` "softmax" (over all), "softmax_topk" (over the
    chosen only) or "sigmoid"; `normalise`: weights divided by their sum; then times `scale`. Ties: lowest index.
    `n_groups` > 1: experts lie in that many equal groups, at most 32, and are chosen from the `n_groups_used` best; a
    group is worth the sum of its two highest scores (the bias in them), under "softmax" its highest alone: the one is
    DeepSeek 3's rule, the other DeepSeek 2's."""

    n_used: int
    scoring: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1


@dataclass(frozen=True)
class KVSpec:
    """Shape of one layer's paged cache. `group` indexes `Batch.block_tables`. `kv_type`: "f32", "f16" or "q8_0".
    `layer`: whose cache it is, for backends that do not keep all layers in one place. `window`: positions that are read
    behind the newest one, 0 for all; blocks behind it are used again."""

    n_kv_heads: int
    k_dim: int
    v_dim: int
    kv_type: str
    block_size: int
    group: int
    layer: int = 0
    window: int = 0


class KVPages(ABC):
    """One layer's K and V blocks, in a layout only its backend knows. Block 0 is the null block: never written."""

    spec: KVSpec
    n_blocks: int

    @abstractmethod
    def read_block(self, block: int) -> bytes:
        """All bytes of one block, for swapping out or saving; valid as input of `write_block` on an equal spec."""

    @abstractmethod
    def write_block(self, block: int, data: bytes) -> None:
        """Overwrite one block with what `read_block` gave."""

    @abstractmethod
    def copy_block(self, source: int, target: int) -> None:
        """Copy one block onto another (copy-on-write)."""

    def touch_block(self, block: int) -> None:  # noqa: B027
        """Take the memory of a block that was never written, where the system gives it on first use."""


class Pass(Protocol):
    """A forward pass that goes on over several calls, see `Backend.begin`."""

    def advance(self, seconds: float) -> bool:
        """Compute for about that long, at least one op. True when nothing is left."""

    def result(self) -> npt.NDArray[np.float32]:
        """What `execute` would have returned, once nothing is left."""


class Backend(ABC):
    """One kind of machine. At most 14 abstract ops; fused ops have defaults composed of them."""

    name: str
    can_pause: bool = False
    """Whether `begin` works: a pass may be computed in parts, other passes between them."""
    reads_maps: bool = False
    """Whether ops read weights where the file is mapped, every time."""
    memory_limit: int | None = None
    """Most bytes the device lets one process hold, where it has a limit of its own beside the machine's memory."""

    # Weights, cache, running. Not ops.
    @abstractmethod
    def load(self, tensor: QTensor) -> Weight:
        """Make a weight usable by the ops; keeps the file's own bytes (a view where memory is shared). 1-D tensors
        (norms, biases, sinks) may be converted to float32."""

    @abstractmethod
    def new_kv(self, spec: KVSpec, n_blocks: int) -> KVPages:
        """Reserve the blocks of one layer. Memory is taken as blocks are first written, where the system allows it."""

    def new_kvs(self, specs: Sequence[KVSpec], n_blocks: Sequence[int]) -> list[KVPages]:
        """`new_kv` for all layers of a model; a backend may lay them out together."""
        return [self.new_kv(spec, n) for spec, n in zip(specs, n_blocks, strict=True)]

    @abstractmethod
    def execute(self, forward: Callable[[Batch], Array], batch: Batch) -> npt.NDArray[np.float32]:
        """Run `forward(batch)` and return its result as a numpy float32 array that the caller owns. Synchronous.
        `forward` must record the same ops for all batches, and take numbers of rows from the shapes of its arrays: a
        backend may record once, for more rows, and replay."""

    def execute_logits(
        self, forward: Callable[[Batch], Array], batch: Batch
    ) -> tuple[npt.NDArray[np.float32], Sequence[tuple[float, int]]]:
        """As `execute` for logits, whose rows may be memory that the next call overwrites; and of each row its largest
        value and the first id that has it (NaN and 0 for a row with a NaN or +inf). Nothing for the latter where a
        backend would have to read whole rows for them."""
        return self.execute(forward, batch), ()

    def begin(self, forward: Callable[[Batch], Array], batch: Batch) -> Pass:
        """As `execute`, in parts: nothing is computed yet. One pass at a time; it ends when it is done or another one
        begins. What is executed between its parts must not write the cache rows that it reads or writes."""
        raise NotImplementedError(f"the {self.name} backend computes a pass at once")

    def keep_weights(self, n_bytes: int | None) -> None:  # noqa: B027
        """From now on `load` keeps at most this many more bytes in the device's memory (None: all it is given); other
        weights stay in the file's memory map and are read from there whenever they are used, slower. Backends that
        map weights anyway have nothing to do."""

    def free_bytes(self) -> int | None:
        """Bytes that can be allocated on a device with memory of its own; None: it is the machine's memory."""
        return None

    def weight_bytes(self, tensor: QTensor) -> int:
        """What `load` takes of the device's memory for a tensor."""
        return int(tensor.data.nbytes)

    def describe(self) -> dict[str, Any]:
        """What `stats` says about this backend: plain data, `name` among it."""
        return {"name": self.name}

    def close(self) -> None:  # noqa: B027
        """Give back threads and device memory. Idempotent."""

    # The ops.
    @abstractmethod
    def embed(self, table: Weight, ids: Int32Array) -> Array:
        """Rows of a (vocab, dim) table, dequantised: (n_tokens, dim). `ids` must be a field of the Batch."""

    @abstractmethod
    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        """x (n, k) times weight (m, k) transposed, plus bias (m,): (n, m)."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Weight | None, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis; x is (n, d) or (n, heads, d); a weight of shape
        (heads, d) norms each head with its own row."""

    @abstractmethod
    def layer_norm(self, x: Array, weight: Weight | None, bias: Weight | None, eps: float) -> Array:
        """(x - mean) / sqrt(var + eps) * weight + bias over the last axis; x and weight as in `rms_norm`."""

    @abstractmethod
    def rope(self, x: Array, batch: Batch, spec: RopeSpec) -> Array:
        """Rotate x (n_tokens, heads, head_dim) by batch.positions with the tables batch.rope_variants choose."""

    @abstractmethod
    def store_kv(self, kv: KVPages, k: Array, v: Array, batch: Batch) -> None:
        """Write k (n_tokens, n_kv_heads, k_dim) and v (.., v_dim) into their sequences' blocks. Side effect on `kv`;
        later ops of this step see it."""

    @abstractmethod
    def attention(self, q: Array, kv: KVPages, batch: Batch, spec: AttentionSpec) -> Array:
        """q (n_tokens, n_heads, k_dim) against the cache, this step's rows included: (n_tokens, n_heads, v_dim).
        Query head h reads kv head h // (n_heads / n_kv_heads)."""

    @abstractmethod
    def activate(self, kind: str, gate: Array, up: Array | None = None) -> Array:
        """f(gate) * up (f(gate) when up is None), elementwise. `kind`: "silu", "gelu" (erf), "gelu_tanh", "relu",
        "relu2" (its square), "sigmoid", "tanh", "exp_rest" (exp(n) - 1 - n of n = min(gate, 0)), "swiglu_oai" (gate
        clipped at 7, up clipped to +-7, gate * sigmoid(1.702 gate) * (up + 1))."""

    @abstractmethod
    def add(self, a: Array, b: Array, scale: float = 1.0) -> Array:
        """a + scale * b, equal shapes."""

    @abstractmethod
    def scale(self, x: Array, factor: float, softcap: float = 0.0) -> Array:
        """x * factor, then softcap * tanh(that / softcap) if softcap > 0."""

    @abstractmethod
    def take(self, x: Array, rows: Int32Array) -> Array:
        """Rows of x (n, d) by index: (len(rows), d). `rows` must be a field of the Batch."""

    @abstractmethod
    def route(self, scores: Array, spec: RouteSpec, bias: Weight | None = None) -> tuple[Array, Array]:
        """Router scores (n, n_experts) -> expert ids (n, n_used) and weights (n, n_used). `bias` is added to the
        scores for choosing only."""

    @abstractmethod
    def expert_linear(self, x: Array, weight: Weight, ids: Array, bias: Weight | None = None) -> Array:
        """Row i's chosen experts: x (n, k) or (n, n_used, k), weight (n_experts, m, k), bias (n_experts, m):
        (n, n_used, m). Reads only the chosen experts' rows."""

    @abstractmethod
    def combine(self, x: Array, weights: Array) -> Array:
        """sum over n_used of weights[i, j] * x[i, j]: (n, n_used, m) -> (n, m), in rising j."""

    # What only some architectures need: a backend without these refuses their models.
    def head_linear(self, x: Array, weight: Weight) -> Array:
        """Each head times its own matrix: x (n, heads, k), weight (heads, m, k) transposed: (n, heads, m)."""
        raise UnsupportedModel(f"the {self.name} backend cannot multiply heads by matrices of their own")

    def columns(self, x: Array, start: int, stop: int) -> Array:
        """start..stop of the last axis."""
        raise UnsupportedModel(f"the {self.name} backend cannot take columns of an activation")

    def concat(self, a: Array, b: Array) -> Array:
        """a and b side by side along the last axis; their other axes are equal."""
        raise UnsupportedModel(f"the {self.name} backend cannot put activations side by side")

    # Fused ops: a backend overrides one where it measures faster; the result must be the same.
    def linears(self, x: Array, weights: Sequence[Weight], biases: Sequence[Weight | None]) -> tuple[Array, ...]:
        """Several products of one input (q, k and v)."""
        return tuple(self.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def gated_mlp(self, x: Array, gate: Weight, up: Weight, down: Weight, kind: str) -> Array:
        """down(f(gate x) * up x)."""
        return self.linear(self.activate(kind, self.linear(x, gate), self.linear(x, up)), down)
