"""`bench`: the object's fields, the tests it runs, and the bytes that each figure is held against."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from edgellm import LLM, SamplingParams
from edgellm.cli.main import main
from edgellm.errors import EdgeLLMError, RequestError
from edgellm.loader import open_gguf
from edgellm.measure.bench import BenchPlan, longest_sequence, run_bench
from edgellm.measure.traffic import kv_read_bytes, weight_read_bytes
from edgellm.models.registry import config_from_metadata
from tests.support.tiny import tiny_gguf

FIELDS = ["test", "n_prompt", "n_gen", "depth", "batch", "tok_s", "runs", "gb_s", "roofline"]


def test_the_json_object_is_the_designs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("edgellm.cli.bench._bandwidth", lambda threads: 10.0)  # not the machine's gigabyte
    model = tiny_gguf(tmp_path / "tiny.gguf")
    lists = ["--depth", "0,40", "--batch", "1,3", "--rows", "1,4"]
    words = ["--prompt", "20", "--gen", "4", *lists, "--runs", "2", "--backend", "reference", "--json"]
    assert main(["bench", str(model), *words]) == 0
    facts = json.loads(capsys.readouterr().out)
    keys = ["model", "backend", "threads", "kv_type", "results", "bandwidth_gb_s", "rss_mb", "load_s", "compile_s"]
    assert list(facts) == keys
    assert all(list(result) == FIELDS for result in facts["results"])
    shapes = [tuple(result[key] for key in FIELDS[:5]) for result in facts["results"]]
    decoding = [("tg4", 0, 4, depth, batch) for depth in (0, 40) for batch in (1, 3)]
    assert shapes == [("pp20", 20, 0, 0, 1), *decoding, ("rows1", 1, 0, 0, 1), ("rows4", 4, 0, 0, 1)]
    for result in facts["results"]:
        low, high = sorted(result["runs"])
        assert 0 < low <= result["tok_s"] <= high
        assert (result["roofline"] is not None) == result["test"].startswith("tg")
        if result["roofline"] is not None:
            assert result["roofline"] == pytest.approx(result["gb_s"] / 10.0, abs=1e-3)


def test_a_measurement_that_fails_leaves_no_request_behind(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", context_length=32)
    with LLM(path, backend="reference", memory=1 << 30, max_seqs=2, max_waiting=1) as llm, open_gguf(path) as gguf:
        plan = BenchPlan(prompt=0, gen=2, batches=(4,), runs=1)
        with pytest.raises(EdgeLLMError):
            list(run_bench(llm, gguf.tensors, plan, 10.0))
        assert llm.generate("ab", SamplingParams(max_tokens=1))[0].finish_reason in ("length", "stop")


def test_bytes_of_one_decode_step(tmp_path: Path) -> None:
    with open_gguf(tiny_gguf(tmp_path / "tiny.gguf")) as gguf:
        config = config_from_metadata(gguf.metadata)
        every = sum(tensor.nbytes for tensor in gguf.tensors.values())
        # The embedding table is the output head too: all of it is read, whatever the number of tokens.
        assert weight_read_bytes(gguf.tensors, config, 3, 3) == every
        # Without logits only the rows of 5 tokens: 300 x 64 F16 less 295 of them.
        assert weight_read_bytes(gguf.tensors, config, 5, 0) == every - 295 * 64 * 2
        # 2 layers x 2 heads x (16 + 16) x 2 bytes.
        assert kv_read_bytes(config, "f16", 100) == 100 * 2 * 2 * 32 * 2


def test_bytes_with_an_output_head_and_experts(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "moe.gguf", "qwen3moe", optional=["output.weight"])
    with open_gguf(path) as gguf:
        config = config_from_metadata(gguf.metadata)
        tensors = gguf.tensors
        experts = sum(t.nbytes for name, t in tensors.items() if "_exps." in name)
        table = tensors["token_embd.weight"].nbytes
        rest = sum(t.nbytes for t in tensors.values()) - experts - table
        # 2 of 4 experts for one token; of two tokens' choices three quarters of the experts on average.
        assert weight_read_bytes(tensors, config, 1, 1) == pytest.approx(rest + table / 300 + experts / 2)
        assert weight_read_bytes(tensors, config, 2, 2) == pytest.approx(rest + table / 150 + experts * 3 / 4)


def test_room_for_the_longest_sequence() -> None:
    assert longest_sequence(BenchPlan(prompt=512, gen=0)) == 514
    assert longest_sequence(BenchPlan(prompt=0, gen=128, depths=(0, 4096))) == 4096 + 128 + 2
    assert longest_sequence(BenchPlan(prompt=0, gen=0, rows=(4, 16))) == 17


@pytest.mark.parametrize("values", [{"batches": (0,)}, {"depths": (-1,)}, {"runs": 0}, {"rows": ()}])
def test_a_plan_that_makes_no_sense_is_refused(values) -> None:
    with pytest.raises(RequestError):
        BenchPlan(**values)


@pytest.mark.parametrize("flag", [["--depth", "a"], ["--batch", "1,,2"], ["--prompt", "-1"]])
def test_wrong_lists_are_wrong_usage(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "x.gguf", *flag]) == 2
    assert "Usage: edgellm bench" in capsys.readouterr().err


def test_a_bandwidth_that_cannot_be_measured_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))  # ends without a word, as what the system kills does
    assert main(["bench", str(tiny_gguf(tmp_path / "tiny.gguf")), "--backend", "reference"]) == 1
    assert capsys.readouterr().err == "edgellm: the bandwidth could not be measured: its process ended with 1\n"


def test_a_plot_that_cannot_be_drawn_is_said_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    for flags, words in (
        (["--plot", str(tmp_path / "none" / "x.png")], "no folder"),
        (["--plot", "x", "--gen", "0"], "off"),
    ):
        assert main(["bench", "no-such-model", *flags]) == 1
        assert words in capsys.readouterr().err
