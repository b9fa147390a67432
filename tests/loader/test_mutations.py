"""Any mutated file loads or ends in a typed one-line error: never another exception, a hang or much memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.errors import GGUFError
from edgellm.loader import open_gguf
from tests.support.gguf_bytes import BOOL, F32, F32V, I32, Q4_1, STRING, U16, U32, U64, GGUFBytes
from tests.support.sandbox import open_in_sandbox


def seed_file() -> bytes:
    out = GGUFBytes(align=16).text("general.architecture", "llama").pair("general.alignment", U32, 16)
    out.array("tokenizer.ggml.tokens", STRING, [f"t{i}" for i in range(300)]).array("s", F32V, [0.5] * 300)
    out.array("flags", BOOL, [True, False]).pair("split.count", U16, 1).pair("n", U64, 7).array("l", I32, [1, 2])
    out.tensor("a.weight", F32, [4, 2], b"\1" * 32).tensor("b.weight", Q4_1, [64], b"\2" * 40)
    return out.build()


SEED = seed_file()
EDGES = [0, 1, 3, 9, 13, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]

overwrite = st.tuples(st.just("write"), st.integers(0, len(SEED) - 1), st.sampled_from(EDGES), st.sampled_from("BHIQ"))
cut = st.tuples(st.just("cut"), st.integers(0, len(SEED)), st.just(0), st.just("B"))
insert = st.tuples(st.just("insert"), st.integers(0, len(SEED)), st.integers(0, 255), st.just("B"))
remove = st.tuples(st.just("remove"), st.integers(0, len(SEED) - 1), st.integers(1, 64), st.just("B"))


def mutate(steps: list[tuple[str, int, int, str]]) -> bytes:
    data = bytearray(SEED)
    for what, pos, value, form in steps:
        pos = min(pos, len(data))
        if what == "write":
            packed = struct.pack("<" + form, value % (1 << 8 * struct.calcsize("<" + form)))
            data[pos : pos + len(packed)] = packed
        elif what == "cut":
            del data[pos:]
        elif what == "insert":
            data[pos:pos] = bytes([value])
        else:
            del data[pos : pos + value]
    return bytes(data)


def use(path: Path) -> None:
    """Opens the file and touches everything in it."""
    with open_gguf(path) as file:
        for key in file.metadata:
            value = file.metadata[key]
            if not isinstance(value, (str, int, float)):
                assert len(list(value)) == len(value)
        for tensor in file.tensors.values():
            assert tensor.data.nbytes == tensor.nbytes and int(tensor.data.sum()) >= 0


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True)
@given(st.lists(st.one_of(overwrite, overwrite, cut, insert, remove), min_size=1, max_size=4))
def test_mutated_files_load_or_end_in_one_line(tmp_path: Path, steps: list[tuple[str, int, int, str]]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(mutate(steps))
    tracemalloc.start()
    try:
        use(path)
    except GGUFError as error:
        assert "\n" not in str(error) and "m.gguf" in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 10 << 20


def test_every_single_field_of_the_header_at_its_extremes(tmp_path: Path) -> None:
    """Each 4-byte place of the header before and after the long arrays, with every edge value, in one bounded child."""
    head, tail = SEED.index(b"t20"), SEED.index(b"flags")
    path = tmp_path / "m.gguf"
    kinds = set()
    for pos in [*range(4, head, 3), *range(tail, len(SEED) - 80, 3)]:
        for value in EDGES[::2]:
            path.write_bytes(mutate([("write", pos, value, "Q")]))
            try:
                use(path)
                kinds.add("loaded")
            except GGUFError as error:
                kinds.add("GGUFError")
                assert "\n" not in str(error)
    assert kinds == {"loaded", "GGUFError"}


def test_mutations_in_a_process_with_little_memory(tmp_path: Path) -> None:
    places = [8, 16, 24, SEED.index(b"tokenizer") - 8, SEED.index(b"tokens") + 6, SEED.index(b"a.weight") + 8]
    paths = []
    for pos in places:
        for value in (2**31 - 1, 2**60, 2**64 - 1):
            paths.append(tmp_path / f"{pos}-{value}.gguf")
            paths[-1].write_bytes(mutate([("write", pos, value, "Q")]))
    for path, result in zip(paths, open_in_sandbox(*paths), strict=True):
        assert result["kind"] == "GGUFError" and result["grown"] < 10 << 20, (path, result)


def test_the_seed_itself_loads(tmp_path: Path) -> None:
    path = tmp_path / "seed.gguf"
    path.write_bytes(SEED)
    use(path)
    with pytest.raises(GGUFError):
        (tmp_path / "t.gguf").write_bytes(SEED[:-1])
        use(tmp_path / "t.gguf")
