"""Which file of a repository a tag means."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edgellm.errors import ModelNotFound

__all__ = ["choose_files", "model_files", "quant_label"]

_NOT_MODELS = re.compile(r"mmproj|imatrix|(^|[-_.])(mtp|eagle3|dflash|dspark)-", re.IGNORECASE)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z", re.IGNORECASE)
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d+_[A-Z0-9_]+|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32|FP16|FP32))(?=[-.]|$)",
    re.IGNORECASE,
)


def model_files(files: Sequence[str]) -> list[str]:
    """The .gguf files that hold a model; of a split model its first file only. Sorted."""
    found = []
    for file in sorted(files):
        base = file.rpartition("/")[2]
        shard = _SHARD.search(base)
        if file.lower().endswith(".gguf") and not _NOT_MODELS.search(base) and (not shard or int(shard[1]) == 1):
            found.append(file)
    return found


def quant_label(file: str) -> str:
    """The quantisation in a file's name (`Q4_K_M`), or the name without its ending where it tells none."""
    base = _SHARD.sub(".gguf", file.rpartition("/")[2])
    labels = _QUANT.findall(base[: -len(".gguf")])
    return labels[-1] if labels else base[: -len(".gguf")]


def choose_files(files: Sequence[str], tag: str, label: str) -> list[str]:
    """The file, or all files of the split model, that `tag` means; case does not matter.

    `latest` is Q4_K_M, else a Q4 of any kind, else the first model file. Raises ModelNotFound that lists what exists.
    """
    models = model_files(files)
    if not models:
        raise ModelNotFound(f"{label} has no GGUF model file; pick a repository that has one (often named ...-GGUF)")
    chosen = _latest(models) if tag.lower() == "latest" else _match(models, tag)
    if chosen is None:
        known = ", ".join(dict.fromkeys(quant_label(file) for file in models))
        raise ModelNotFound(f"{label} has no file for {tag}; it has: {known[:600]}")
    shard = _SHARD.search(chosen)
    if not shard:
        return [chosen]
    count = int(shard[2])
    prefix = chosen[: shard.start()]
    parts = [f"{prefix}-{i + 1:05}-of-{count:05}.gguf" for i in range(min(count, 1000))]
    missing = [part for part in parts if part not in files]
    if missing:
        raise ModelNotFound(f"{label}: the split model {chosen} lacks {missing[0]}")
    return parts


def _latest(models: list[str]) -> str:
    return _match(models, "Q4_K_M") or next((f for f in models if _has(f, r"[^/]*?(?<![A-Z0-9])Q4")), models[0])


def _match(models: list[str], tag: str) -> str | None:
    exact = [f for f in models if tag.lower() in (f.lower(), f.rpartition("/")[2].lower())]
    pattern = re.compile(rf"(?<![a-z0-9]){re.escape(tag)}(?=[-.])", re.IGNORECASE)
    named = [f for f in models if pattern.search(f.rpartition("/")[2])]
    return next(iter(exact or named), None)


def _has(file: str, pattern: str) -> bool:
    return re.match(pattern, file.rpartition("/")[2], re.IGNORECASE) is not None
