"""Products of activations and weights: which of the device's ways each one takes.

Few rows: our matvec kernels, weights of one type and one input in one launch, an RMS norm of the input folded in.
Prompts: weights dequantised to half by our kernel, then MLX's matmul. Where `choice.py` measured MLX's affine format
faster, that. Without a Metal device, and for row lengths no kernel takes: dequantised weights in plain ops."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby

import mlx.core as mx

from edgellm.backends.base import GGMLType
from edgellm.backends.metal.affine import AFFINE_TYPES, affine_product
from edgellm.backends.metal.choice import Choices
from edgellm.backends.metal.kernels import MATRICES, MAX_ROWS, MatmulKernels
from edgellm.backends.metal.normed import Normed, plain
from edgellm.backends.metal.selftest import check_type
from edgellm.backends.metal.weights import DenseCache, MetalWeight

__all__ = ["Products"]

log = logging.getLogger(__name__)

DENSE_LIMIT = 4 << 30
"""Bytes of dequantised weights kept where no kernel reads the blocks as they lie."""
HALF_BYTES = 128 << 20
"""Bytes of a weight that are half at once during a prompt: what plans count as scratch must hold it."""
MOST_BY_EIGHTS = 32
"""Rows of the most launches of eight that are tried. By bytes alone eight of them equal a Q4_K weight's halves, written
and read; but each also unpacks the weight again."""


class Products:
    """`kernels` None: plain ops. `choices` None: nothing is measured, our kernels are taken. `spare`: bytes that
    repacked weights may take beyond the file's own, which memory plans do not know of."""

    def __init__(self, kernels: MatmulKernels | None, choices: Choices | None, spare: int = 0):
        self._kernels, self._choices, self._spare = kernels, choices, spare
        self.dense = DenseCache(DENSE_LIMIT)
        self._verdicts: dict[GGMLType, bool] = {}

    def choose_format(self, weight: MetalWeight) -> None:
        """Repack a new weight where that is faster. Tables that rows are read from keep their blocks."""
        table = len(weight.shape) != 2 or "embd" in weight.name
        if self._choices is None or weight.data is None or weight.kind not in AFFINE_TYPES or table:
            return
        n, k = weight.shape
        extra = n * k * (AFFINE_TYPES[weight.kind] + 2) // 8 - weight.nbytes
        if extra > self._spare:
            return
        x = mx.ones((1, k), dtype=mx.float32)
        packed = cache(lambda: weight.packed())
        ways: dict[str, Callable[[], mx.array]] = {
            "kernel": lambda: self._matrix(x, weight),
            "affine": lambda: affine_product(x, packed()),
        }
        key = f"{weight.kind.name} {n}x{k}"
        if self._choices.winner(key, tuple(ways), lambda way: _seconds(ways[way])) == "affine":
            weight.repack(packed())
            self._spare -= extra

    def linears(self, x: mx.array | Normed, weights: Sequence[MetalWeight]) -> Iterator[mx.array]:
        """x (n, k) times each weight (m, k) transposed, float32 (n, m)."""
        for kind, members in groupby(weights, key=lambda weight: self._kernel_kind(x, weight)):
            group = list(members)
            if kind is None:
                yield from (self._product(plain(x), weight) for weight in group)
                continue
            for at in range(0, len(group), MATRICES):
                yield from self._matvecs(x, kind, [w.device for w in group[at : at + MATRICES]])

    def experts(self, x: mx.array, weight: MetalWeight, ids: mx.array) -> mx.array:
        """x (n, k) or (n, n_used, k), weight (n_experts, m, k), ids (n, n_used) -> (n, n_used, m)."""
        if kernels := self._usable(weight.kind, x.shape[-1]):
            return _settled(kernels.expert_matvec(weight.device, weight.kind, x, ids), weight)
        rows = x[:, None, None, :] if x.ndim == 2 else x[:, :, None, :]
        y = mx.gather_mm(rows, self.dense.get(weight).swapaxes(-1, -2), rhs_indices=ids).squeeze(-2)
        return _settled(y, weight)

    def _usable(self, kind: GGMLType, k: int) -> MatmulKernels | None:
        """Our kernels, if they take rows of k such weights and are right on this device."""
        kernels = self._kernels
        if kernels is None or not kernels.fits(kind, k):
            return None
        if self._choices is None or self._verdicts.get(kind):
            return kernels
        if kind not in self._verdicts:
            checked = partial(_all_passed, kernels, kind)
            self._verdicts[kind] = self._choices.passed(f"kernels of {kind.name}", checked)
            if not self._verdicts[kind]:
                log.warning(
                    "the %s kernels are wrong on this device, so plain MLX ops take their place, slower and with more "
                    "memory; please report what `edgellm doctor --backend metal` prints, or use --backend cpu",
                    kind.name,
                )
        return kernels if self._verdicts[kind] else None

    def _kernel_kind(self, x: mx.array | Normed, weight: MetalWeight) -> GGMLType | None:
        """The type of a weight that may share a launch with its neighbours of the same type, else None."""
        if x.shape[0] > MAX_ROWS or weight.data is None or self._usable(weight.kind, x.shape[-1]) is None:
            return None
        return weight.kind

    def _matvecs(self, x: mx.array | Normed, kind: GGMLType, matrices: list[mx.array]) -> list[mx.array]:
        kernels = self._kernels
        assert kernels is not None
        if isinstance(x, Normed) and self._folds(x, kind, matrices, kernels):
            return kernels.matvecs(matrices, kind, x.x, x.gain, x.eps)
        return kernels.matvecs(matrices, kind, plain(x))

    def _folds(self, x: Normed, kind: GGMLType, matrices: list[mx.array], kernels: MatmulKernels) -> bool:
        """Whether products of this shape are faster with the norm inside."""
        if self._choices is None:
            return True
        n, (m, k) = sum(int(w.shape[0]) for w in matrices), x.shape
        rows, gain = mx.ones((m, k), dtype=mx.float32), mx.ones((k,), dtype=mx.float32)
        ways: dict[str, Callable[[], list[mx.array]]] = {
            "norm apart": lambda: kernels.matvecs(matrices, kind, mx.fast.rms_norm(rows, gain, x.eps)),
            "norm inside": lambda: kernels.matvecs(matrices, kind, rows, gain, x.eps),
        }
        key = f"norm {kind.name} {m} rows {n}x{k}"
        return self._choices.winner(key, tuple(ways), lambda way: _seconds(ways[way])) == "norm inside"

    def _product(self, x: mx.array, weight: MetalWeight) -> mx.array:
        return _settled(self._matrix(x, weight), weight)

    def _matrix(self, x: mx.array, weight: MetalWeight) -> mx.array:
        if weight.affine is not None:
            return affine_product(x, weight.affine)
        kernels = self._usable(weight.kind, x.shape[-1])
        if kernels is None:
            return x @ self.dense.get(weight).T
        if x.shape[0] <= MAX_ROWS or self._by_eights(x.shape[0], weight, kernels):
            parts = [x[at : at + MAX_ROWS] for at in range(0, x.shape[0], MAX_ROWS)]
            return _joined([kernels.matvec(weight.device, weight.kind, part) for part in parts], axis=0)
        return _half_product(kernels, x, weight)

    def _by_eights(self, m: int, weight: MetalWeight, kernels: MatmulKernels) -> bool:
        """Whether a few more rows than one launch takes are faster as several launches, which read the weight as often,
        than as one product of dequantised halves."""
        if self._choices is None or m > MOST_BY_EIGHTS:
            return False
        (n, k), launches = weight.shape, -(-m // MAX_ROWS)
        x = mx.ones((MAX_ROWS, k), dtype=mx.float32)
        ways: dict[str, Callable[[], list[mx.array]]] = {
            "halves": lambda: [_half_product(kernels, mx.tile(x, (launches, 1)), weight)],
            "by eights": lambda: [kernels.matvec(weight.device, weight.kind, x + i) for i in range(launches)],
        }
        key = f"{launches * MAX_ROWS} rows {weight.kind.name} {n}x{k}"
        return self._choices.winner(key, tuple(ways), lambda way: _seconds(ways[way])) == "by eights"


def _all_passed(kernels: MatmulKernels, kind: GGMLType) -> bool:
    return all(check.passed for check in check_type(kernels, kind))


def _half_product(kernels: MatmulKernels, x: mx.array, weight: MetalWeight) -> mx.array:
    """x (m, k) times the weight as half, some of its rows at a time."""
    # Some models' activations pass the 65504 of a half: rows are scaled to 1 on the way in.
    size = mx.maximum(mx.max(mx.abs(x), axis=-1, keepdims=True), 1e-30)
    scaled = (x / size).astype(mx.float16)
    (n, k), data = weight.shape, weight.device
    rows = max(1, HALF_BYTES // (2 * k))
    halves = (kernels.dequantize_half(data[at : at + rows], weight.kind, k) for at in range(0, n, rows))
    return _joined([(scaled @ half.T).astype(mx.float32) for half in halves], axis=1) * size


def _joined(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def _settled(y: mx.array, weight: MetalWeight) -> mx.array:
    """The product, computed now when its weight was copied for it: that copy must go before the next is made."""
    if weight.mapped is not None:
        mx.eval(y)
    return y


def _seconds(run: Callable[[], mx.array | list[mx.array]]) -> float:
    started = time.perf_counter()
    mx.eval(run())
    return time.perf_counter() - started
