"""Checks of a model that is here: its blobs against their digests, its tensors against the file, its scales for NaN."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgellm.errors import EdgeLLMError
from edgellm.hub import store as st
from edgellm.hub.disk import write_failed
from edgellm.hub.journal import Partial, part_digest
from edgellm.hub.manifest import Layer
from edgellm.hub.names import is_path
from edgellm.hub.store import Store
from edgellm.loader import open_gguf
from edgellm.quants import QUANT_TABLE, GGMLType, QTensor

__all__ = ["Report", "scan_tensor", "verify"]

_CHUNK = 8 << 20
_SCALES: dict[GGMLType, tuple[int, ...]] = {
    **dict.fromkeys((GGMLType.Q4_0, GGMLType.Q5_0, GGMLType.Q8_0, GGMLType.IQ4_NL, GGMLType.IQ4_XS), (0,)),
    **dict.fromkeys((GGMLType.Q4_1, GGMLType.Q5_1, GGMLType.Q8_1, GGMLType.Q4_K, GGMLType.Q5_K), (0, 2)),
    **dict.fromkeys((GGMLType.IQ2_XXS, GGMLType.IQ2_XS, GGMLType.IQ2_S, GGMLType.IQ3_XXS, GGMLType.IQ3_S), (0,)),
    **dict.fromkeys((GGMLType.IQ1_S, GGMLType.Q1_0, GGMLType.Q2_0), (0,)),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q6_K: (208,),
    GGMLType.TQ1_0: (52,),
    GGMLType.TQ2_0: (64,),
}
"""Where the float16 scales lie in a block."""
_FLOATS = {GGMLType.F32: "<f4", GGMLType.F16: "<f2", GGMLType.F64: "<f8"}


@dataclass
class Report:
    """What was found. `problems`: one line each; empty when all is right."""

    name: str
    hashed_bytes: int = 0
    tensors: int = 0
    scanned: int = 0
    problems: list[str] = field(default_factory=list)
    not_scanned: list[str] = field(default_factory=list)


def verify(
    text: str,
    store: Store | None = None,
    scan: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Hashes a stored model again and checks its tensors' bounds; with `scan` also all scales for NaN and infinity.

    A blob of our own store whose digest is wrong is moved aside (never deleted): the next pull of that name fetches
    its parts again and replaces those that differ. A bare file has no digest: only its tensors are checked.
    """
    store = store or Store()
    if is_path(text):
        report, path = Report(text), st.resolve(text, store)
    else:
        model = st.find(text, store, to_run=False)
        report, path = Report(str(model.name)), model.path
        manifest = store.manifest(model.name) if model.origin == "edgellm" else None
        blobs = manifest.blobs if manifest else _named_by_digest(path)
        total = sum(blob.size for blob in blobs)
        for layer in blobs:
            file = store.blob_path(layer.digest) if manifest else path.resolve()
            found = _hash(file, report, total, progress)
            if f"sha256:{found}" != layer.digest:
                report.problems.append(f"{layer.digest[:19]}... is damaged: its sha256 is {found}")
                if manifest:
                    _set_aside(store, layer, report, st.bring_back(model.name, manifest))
    if not report.problems:
        _check_tensors(path, scan, report)
    return report


def _named_by_digest(path: Path) -> tuple[Layer, ...]:
    """Other programs name blobs by their digest too: `sha256-<hex>`, or the bare hex in the hub's cache."""
    file = path.resolve()
    digest = file.name.removeprefix("sha256-").removeprefix("sha256:")
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        return ()
    return (Layer("", f"sha256:{digest}", file.stat().st_size),)


def _hash(path: Path, report: Report, total: int, progress: Callable[[int, int], None]) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(_CHUNK):
                digest.update(block)
                report.hashed_bytes += len(block)
                progress(report.hashed_bytes, total)
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return digest.hexdigest()


def _set_aside(store: Store, layer: Layer, report: Report, then: str) -> None:
    """Moves a damaged blob to the downloads, marked as wrong, with the digests its parts have now. `then`: what the
    user does next."""
    key = layer.digest.replace(":", "-")
    blob = store.blob_path(layer.digest)
    try:
        store.partial.mkdir(parents=True, exist_ok=True)
        os.replace(blob, store.partial / f"{key}.data")
    except OSError as error:
        raise write_failed(blob, error) from None
    partial = Partial(store.partial, key, layer.size, report.name)
    parts = range(partial.geometry.n_parts)
    partial.note([(part, part_digest(partial.read(part))) for part in parts])
    partial.mark_bad(True)
    partial.close()
    report.problems.append(f"it was set aside; to repair it: {then}")


def _check_tensors(path: Path, scan: bool, report: Report) -> None:
    try:
        with open_gguf(path) as model:
            for tensor in model.tensors.values():
                report.tensors += 1
                if not scan:
                    continue
                bad = scan_tensor(tensor)
                if bad is None:
                    report.not_scanned.append(tensor.name)
                    continue
                report.scanned += 1
                if bad:
                    report.problems.append(f"tensor {tensor.name}: {bad} scales are NaN or infinite")
    except EdgeLLMError as error:
        report.problems.append(str(error))


def scan_tensor(tensor: QTensor) -> int | None:
    """How many of a tensor's scales (of a float tensor: its values) are NaN or infinite; None: type not scanned."""
    if not tensor.data.size:
        return 0
    blocks = tensor.data.reshape(-1, QUANT_TABLE[tensor.type].type_size)
    bad = 0
    for start in range(0, len(blocks), 1 << 20):
        piece = blocks[start : start + (1 << 20)]
        if tensor.type in _FLOATS:
            bad += _not_finite(piece.reshape(-1).view(_FLOATS[tensor.type]))
        elif tensor.type is GGMLType.BF16:
            bits = piece.reshape(-1).view("<u2")
            bad += int(np.count_nonzero(bits & 0x7F80 == 0x7F80))
        elif tensor.type in _SCALES:
            for place in _SCALES[tensor.type]:
                bad += _not_finite(np.ascontiguousarray(piece[:, place : place + 2]).view("<f2"))
        else:
            return None
    return bad


def _not_finite(values: npt.NDArray[np.generic]) -> int:
    return int(np.count_nonzero(~np.isfinite(values.astype(np.float32))))
