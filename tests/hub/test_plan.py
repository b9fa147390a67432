"""Plans: a 70B Llama from its header alone, windowed layers, experts, what to do where it does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgellm.errors import EdgeLLMError, RequestError, UnsupportedModel
from edgellm.hub import plan
from edgellm.hub.machines import MACHINES, machine
from edgellm.hub.sources import find_remote
from edgellm.hub.web import Web
from tests.support.gguf_bytes import F32, F32V, STRING, U32, GGUFBytes
from tests.support.hubs import serve_hub
from tests.support.origin import Origin, Reply
from tests.support.real import real_model

Q4_K, Q5_K, Q6_K = 12, 13, 14
DIM, FFN, LAYERS, HEADS, KV_HEADS, VOCAB = 8192, 28672, 80, 64, 8, 128256


def more_bits(layer: int) -> bool:
    """The layers to which Q4_K_M gives Q6_K in ffn_down: the first and last eighth, and every third between."""
    return layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2


def tensors_of_70b() -> list[tuple[str, int, list[int]]]:
    """Names, types and shapes (row width first) of Llama 3.1 70B in Q4_K_M, from the published hyper-parameters."""
    kv = KV_HEADS * DIM // HEADS
    found = [("token_embd.weight", Q4_K, [DIM, VOCAB]), ("output_norm.weight", F32, [DIM])]
    found += [("output.weight", Q6_K, [DIM, VOCAB]), ("rope_freqs.weight", F32, [64])]
    for i in range(LAYERS):
        wide = Q6_K if more_bits(i) else Q4_K
        layer = {"attn_norm": (F32, [DIM]), "ffn_norm": (F32, [DIM]), "attn_q": (Q4_K, [DIM, DIM])}
        layer |= {"attn_k": (Q4_K, [DIM, kv]), "attn_v": (Q6_K if more_bits(i) else Q5_K, [DIM, kv])}
        layer |= {"attn_output": (Q4_K, [DIM, DIM]), "ffn_gate": (Q4_K, [DIM, FFN]), "ffn_up": (Q4_K, [DIM, FFN])}
        layer |= {"ffn_down": (wide, [FFN, DIM])}
        found += [(f"blk.{i}.{name}.weight", kind, ne) for name, (kind, ne) in layer.items()]
    return found


def header_70b() -> tuple[bytes, int]:
    """The header's bytes, and the size of the whole file."""
    out = GGUFBytes().text("general.architecture", "llama").text("general.name", "Llama 3.1 70B")
    numbers = {"block_count": LAYERS, "context_length": 131072, "embedding_length": DIM, "vocab_size": VOCAB}
    numbers |= {"feed_forward_length": FFN, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}
    for key, value in {**numbers, "rope.dimension_count": 128}.items():
        out.pair(f"llama.{key}", U32, value)
    out.pair("llama.attention.layer_norm_rms_epsilon", F32V, 1e-5).pair("llama.rope.freq_base", F32V, 500000.0)
    out.text("tokenizer.ggml.model", "gpt2").array("tokenizer.ggml.tokens", STRING, [f"t{i}" for i in range(VOCAB)])
    place = 0
    for name, kind, ne in tensors_of_70b():
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        out.tensor(name, kind, ne, b"", offset=place)
        place += -(-int(np.prod(ne)) // block * size // 32) * 32
    head = out.build()
    return head, len(head) + place


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse file: the real header, and 42.5 GB that take no room on the disk."""
    path = tmp_path_factory.mktemp("big") / "llama-70b-Q4_K_M.gguf"
    head, size = header_70b()
    path.write_bytes(head)
    os.truncate(path, size)
    return path


def test_70b_arithmetic(big: Path) -> None:
    facts = plan.local_facts(big)
    weights = sum(
        int(np.prod(ne)) * gguf.GGML_QUANT_SIZES[t][1] // gguf.GGML_QUANT_SIZES[t][0]
        for _, kind, ne in tensors_of_70b()
        for t in [gguf.GGMLQuantizationType(kind)]
    )
    made = plan.make(facts, machine("m2-ultra-192gb"), 8192)
    assert made.memory.weights_bytes == weights
    assert weights == pytest.approx(42.5e9, rel=1e-3)  # the published file has 42.5 GB
    assert made.memory.kv_bytes_per_token == 80 * 2 * 8 * 128 * 2 == 327680
    assert made.memory.kv_bytes == 327680 * 8192 and round(made.memory.kv_bytes / 1e9, 2) == 2.68
    m = made.memory
    assert m.total_bytes == m.weights_bytes + m.kv_bytes + m.scratch_bytes + m.runtime_bytes and m.fits
    assert m.max_ctx == 131072
    read = weights - VOCAB * DIM * 144 // 256 + DIM * 144 // 256  # one row of the embedding
    assert made.tok_s_ceiling == pytest.approx(800e9 / read)
    assert facts.n_weights == pytest.approx(70.55e9, rel=1e-3)


def test_the_macs_that_70b_fits_on(big: Path) -> None:
    macs = [m for m in MACHINES.values() if m.source == "[A]"]
    fitting = set(plan.machines_that_fit(plan.local_facts(big), macs, 8192, "f16"))
    by_hand = {m.name for m in macs if m.memory >= 64 << 30}  # 46 GB against 48 GiB of the 64 GB machines
    assert fitting == by_hand and "m1-max-64gb" in fitting and "m4-pro-48gb" not in fitting


def test_what_to_do_where_it_does_not_fit(big: Path) -> None:
    facts = plan.local_facts(big)
    made = plan.make(facts, machine("m3-max-48gb"), 8192)
    assert not made.memory.fits and made.memory.max_ctx == 0
    assert any("Q3_K_M" in line for line in made.advice)
    tight = plan.make(facts, machine("m1-max-64gb"), 32768)
    assert not tight.memory.fits and tight.advice[0] == "--kv-type q8_0 would fit 32768 tokens"
    assert tight.advice[1] == f"--ctx {tight.memory.max_ctx} would fit"
    assert plan.make(facts, machine("m1-max-64gb"), tight.memory.max_ctx).memory.fits
    assert not plan.make(facts, machine("m1-max-64gb"), tight.memory.max_ctx + 64).memory.fits
    assert "does not fit m1-max-64gb" in plan.verdict(facts, tight)
    none = plan.make(facts, machine("m1-8gb"))
    assert none.advice == ("no quantisation of this model fits; choose one with fewer weights",)


def test_only_the_header_is_read(origin: Origin, big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "llama-70b-Q4_K_M.gguf"
    origin.file(f"/cdn/{path}", big)
    listing = {"rfilename": path, "lfs": {"sha256": "a" * 64, "size": big.stat().st_size}}
    body = json.dumps({"sha": "c" * 40, "siblings": [listing]}).encode()
    origin.handle(lambda r: Reply(body=body) if r.path.startswith("/api/models/u/r") else None)
    there = f"{origin.url}/cdn/{path}"
    origin.handle(lambda r: Reply(302, headers={"Location": there}) if "/resolve/" in r.path else None)
    monkeypatch.setenv("HF_ENDPOINT", origin.url)
    with Web() as web:
        facts = plan.remote_facts(web, find_remote(web, "hf.co/u/r:q4_k_m"))
    assert facts.weights_bytes == plan.local_facts(big).weights_bytes
    head = len(header_70b()[0])
    assert head <= origin.asked(f"/cdn/{path}") <= 2 * head + (256 << 10) < 8 << 20


def test_headers_that_lie(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote file that is cut, or no model at all: a typed error after one small read."""
    monkeypatch.setenv("HF_ENDPOINT", origin.url)
    head, _ = header_70b()
    cut = tmp_path / "cut-Q4_K_M.gguf"
    cut.write_bytes(head[: len(head) // 2])
    page = tmp_path / "page-Q4_K_M.gguf"
    page.write_bytes(b"<html>" * 10)
    alien = GGUFBytes().text("general.architecture", "alien").write(tmp_path / "alien-Q4_K_M.gguf")
    for file, kind in ((cut, EdgeLLMError), (page, EdgeLLMError), (alien, UnsupportedModel)):
        serve_hub(origin, f"u/{file.stem[:3]}", {file.name: file})
        with Web() as web, pytest.raises(kind):
            plan.remote_facts(web, find_remote(web, f"hf.co/u/{file.stem[:3]}"))


def test_windowed_layers_are_counted_as_such() -> None:
    """Gemma 3's pattern: five layers of six see 512 positions, so a long context costs little."""
    from edgellm.models.config import ModelConfig, RopeConfig

    windows = tuple(0 if i % 6 == 5 else 512 for i in range(12))
    config = ModelConfig("gemma3", 12, 640, 4, 1, 256, 256, 2048, 1000, 32768, 1e-6, RopeConfig(256), windows=windows)
    facts = plan.ModelFacts("g", config, (), 1000)
    row = 2 * 256 * 2
    made = plan.make(facts, machine("m1-8gb"), 32768).memory
    full, bounded = 2 * row * 32768, 10 * row * (512 + 512 + 2 * 32)
    assert made.kv_bytes == full + bounded and made.kv_bytes_per_token == 12 * row


def test_experts_that_are_not_used_are_not_read() -> None:
    from edgellm.loader import TensorInfo
    from edgellm.models.config import ModelConfig, RopeConfig
    from edgellm.quants import GGMLType

    shape = {"n_experts": 8, "n_experts_used": 2, "expert_ffn_dim": 64}
    config = ModelConfig("qwen3moe", 1, 64, 4, 4, 16, 16, 64, 100, 1024, 1e-6, RopeConfig(16), **shape)  # type: ignore[arg-type]
    infos = (
        TensorInfo("token_embd.weight", GGMLType.F32, (100, 64), 0, 25600),
        TensorInfo("blk.0.ffn_up_exps.weight", GGMLType.F32, (8, 64, 64), 0, 131072),
    )
    assert plan.ModelFacts("m", config, infos, 100).bytes_per_token == 25600 + 131072 / 4


def test_a_draft_counts(big: Path) -> None:
    facts = plan.local_facts(big)
    alone, both = (plan.make(facts, machine("m2-ultra-192gb"), 8192, draft=d).memory for d in (None, facts))
    assert both.draft_bytes == facts.weights_bytes + alone.kv_bytes
    assert both.total_bytes == alone.total_bytes + both.draft_bytes


def test_machines() -> None:
    assert machine(" M1-16GB ").memory == 16 << 30
    with pytest.raises(RequestError, match="m2-ultra-192gb"):
        machine("cray-1")
    for name in ("m1-16gb", "m2-ultra-192gb", "m4-max-64gb"):
        assert MACHINES[name].budget < MACHINES[name].memory and MACHINES[name].source


CHILD = """
import sys
from edgellm import LLM, SamplingParams
from edgellm.memory import peak_bytes
with LLM(sys.argv[1], ctx=512) as llm:
    llm.generate([list(range(300, 780))], SamplingParams(max_tokens=32, temperature=0, ignore_eos=True))
    print(llm.stats()["planned_bytes"], peak_bytes())
"""


@pytest.mark.real
@pytest.mark.parametrize("name", ["gemma3-270m.gguf", "llama-1b.gguf"])
def test_planned_against_measured(name: str) -> None:
    """A full context of 512 tokens, all weights touched (the embedding is the output head): 5% of the peak.
    llama-1b: random weights, made by hand where somebody wants the check."""
    path = real_model(name)
    facts = plan.local_facts(path)
    for _ in range(2):  # the first run may compile kernels, which is not what is planned
        done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=True)
    planned_at_load, peak = map(int, done.stdout.split())
    assert plan.make(facts, None, 512).memory.total_bytes == pytest.approx(peak, rel=0.05)
    assert planned_at_load > 0
