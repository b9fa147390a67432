"""Whatever a metadata value is turned into, a model loads and runs or is refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.backends import create
from edgellm.errors import EdgeLLMError, UnsupportedModel
from edgellm.loader import GGUFFile, open_gguf
from edgellm.models.registry import SUPPORTED, load_model
from tests.support.models import make_batch, new_kv
from tests.support.tiny import tiny_gguf

EXTRA = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.dimension_count": 8,
    "attention.sliding_window_pattern": 2,
    "logit_scale": 1.0,
    "use_parallel_residual": False,
    "pooling_type": 1,
}

values = st.one_of(
    st.integers(-(1 << 63), 1 << 63),
    st.integers(-2, 70),
    st.floats(width=32),
    st.booleans(),
    st.text(max_size=8),
    st.sampled_from(["none", "linear", "yarn", "longrope"]),
    st.lists(st.integers(0, 9), max_size=4),
    st.lists(st.booleans(), min_size=2, max_size=2),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, GGUFFile]]:
    folder: Path = tmp_path_factory.mktemp("damaged")
    opened = {}
    for arch in SUPPORTED:
        more = {f"{arch}.{key}": value for key, value in EXTRA.items()}
        opened[arch] = open_gguf(tiny_gguf(folder / f"{arch}.gguf", arch, quant="F32", metadata=more))
    yield opened
    for file in opened.values():
        file.close()


def run(metadata: dict[str, Any], file: GGUFFile) -> None:
    backend = create("reference")
    model = load_model(SimpleNamespace(metadata=metadata, tensors=file.tensors), backend)  # type: ignore[arg-type]
    kv = new_kv(model.config, backend, "f32", 3)
    tables = [np.array([[1, 2]], np.int32)] * len(model.config.cache_groups)
    batch = make_batch([[5, 6, 7]], [0], tables, None, [model.config.rope_variant(3)])
    with np.errstate(all="ignore"):
        backend.execute(lambda b: model.hidden(b, kv), batch)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(data=st.data(), arch=st.sampled_from(SUPPORTED), value=values)
def test_one_value_replaced(data: st.DataObject, arch: str, value: object, files: dict[str, GGUFFile]) -> None:
    metadata = dict(files[arch].metadata)
    key = data.draw(st.sampled_from(sorted(k for k in metadata if k.startswith(arch))))
    try:
        run({**metadata, key: value}, files[arch])
    except EdgeLLMError as error:
        assert "\n" not in str(error) and len(str(error)) < 600


@pytest.mark.parametrize("arch", ["bert", "gemma3", "gpt-oss", "llama", "phi3"])
def test_one_key_missing(arch: str, files: dict[str, GGUFFile]) -> None:
    metadata = dict(files[arch].metadata)
    for key in [k for k in metadata if k.startswith(arch)]:
        try:
            run({k: v for k, v in metadata.items() if k != key}, files[arch])
        except EdgeLLMError as error:
            assert "\n" not in str(error)


def test_tensors_without_values_are_refused(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "empty.gguf", ffn_dim=0, quant="F32")
    with open_gguf(path) as file, pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_\w+\.weight is empty"):
        load_model(file, create("reference"))
