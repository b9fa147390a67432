"""Case B05: split models."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from edgellm.errors import GGUFError, ModelNotFound
from edgellm.loader import open_gguf
from tests.support.gguf_bytes import F32, STRING, U16, GGUFBytes, write_shards


def parts(first_empty: bool = False) -> list[GGUFBytes]:
    """Three parts with tensors t0 .. t5 (t<i> holds four times i); only the first has the metadata."""
    made = [GGUFBytes().text("general.architecture", "llama"), GGUFBytes(), GGUFBytes()]
    for i in range(6):
        part = 1 + i % 2 if first_empty else i // 2
        made[part].tensor(f"t{i}", F32, [4], np.full(4, i, "<f4").tobytes())
    return made


def values(path: Path) -> dict[str, float]:
    with open_gguf(path) as file:
        assert file.architecture == "llama"
        return {name: float(file.tensors[name].data.view("<f4")[0]) for name in file.tensors}


@pytest.mark.parametrize("first_empty", [False, True])
def test_b05_any_shard_opens_the_whole_set(first_empty: bool, tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "m", parts(first_empty))
    other = write_shards(tmp_path, "m-other", parts())  # a second set in the same folder
    expected = {f"t{i}": float(i) for i in range(6)}
    for path in paths:
        assert values(path) == expected
        assert open_gguf(path).paths == tuple(paths)
    assert values(other[1]) == expected
    assert open_gguf(paths[0]).nbytes == 6 * 16


def test_b05_list_of_paths_under_other_names(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "m", parts())
    blobs = [p.rename(tmp_path / f"sha256-{i}") for i, p in enumerate(paths)]
    with open_gguf(blobs) as file:
        assert sorted(file.tensors) == [f"t{i}" for i in range(6)]
    with pytest.raises(GGUFError, match=r"sha256-1.*part 2.*part 1"):
        open_gguf([blobs[1], blobs[0], blobs[2]])
    with pytest.raises(GGUFError, match=r"original names"):
        open_gguf(blobs[0])
    with pytest.raises(GGUFError, match=r"no file"):
        open_gguf([])


def test_b05_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "m", parts())
    paths[1].unlink()
    for path in (paths[0], paths[2]):
        with pytest.raises(ModelNotFound, match=r"m-00002-of-00003.gguf"):
            open_gguf(path)


def test_b05_swapped_shards_are_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "m", parts())
    shutil.move(paths[1], tmp_path / "x")
    shutil.move(paths[2], paths[1])
    shutil.move(tmp_path / "x", paths[2])
    with pytest.raises(GGUFError, match=r"m-00002-of-00003.gguf: is part 3"):
        open_gguf(paths[0])


def test_b05_count_that_contradicts_the_names(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "m", parts(), count=4)
    with pytest.raises(GGUFError, match=r"one of 4 files"):
        open_gguf(paths[0])


def test_b05_tensor_total_and_repeats(tmp_path: Path) -> None:
    some = parts()
    some[1].tensor("t0", F32, [4], b"\0" * 16)
    with pytest.raises(GGUFError, match=r"m-00002-of-00003.*'t0' is also in .*m-00001-of-00003"):
        open_gguf(write_shards(tmp_path, "m", some)[0])
    paths = write_shards(tmp_path, "n", parts())
    fewer = GGUFBytes().pair("split.no", U16, 2).pair("split.count", U16, 3)
    fewer.write(paths[2])
    with pytest.raises(GGUFError, match=r"split.tensors.count is 6, but the files hold 4"):
        open_gguf(paths[0])


def test_b05_split_keys_of_the_wrong_kind(tmp_path: Path) -> None:
    path = GGUFBytes().pair("split.count", STRING, "three").write(tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match=r"split.count must be a whole number"):
        open_gguf(path)
    path = GGUFBytes().pair("split.count", U16, 1).pair("split.no", U16, 0).write(tmp_path / "one.gguf")
    assert len(open_gguf(path).paths) == 1
