"""Whether a draft fits its target: what is refused (B33), what is warned of, and the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from edgellm import LLM
from edgellm.cli.main import main
from edgellm.errors import DraftPairError, EdgeLLMError, RequestError
from edgellm.measure.pair import weigh_pair
from tests.support.tiny import tiny_gguf

NO_TEMPLATE: dict[str, Any] = {"metadata": {"tokenizer.chat_template": None}}


def test_b33_pairs_that_cannot_work_are_refused_at_load(tmp_path: Path) -> None:
    shape = {"context_length": 64, "chat_template": None}
    target = tiny_gguf(tmp_path / "target.gguf", **shape)  # type: ignore[arg-type]
    tokens = [f.decode() for f in _tokens(gguf.GGUFReader(target))]
    tokens[100] = "changed"
    cases = {
        "text": ({"metadata": {"tokenizer.ggml.tokens": tokens}}, "token 100 is .* and 'changed'"),
        "bos": ({"metadata": {"tokenizer.ggml.bos_token_id": 5}}, "bos_id is 0 in the target and 5"),
        "size": ({"vocab_size": 1200}, "300 and 1200 tokens"),
    }
    for name, (changes, message) in cases.items():
        draft = tiny_gguf(tmp_path / f"{name}.gguf", **{**shape, **changes})  # type: ignore[arg-type]
        with pytest.raises(DraftPairError, match=f"{name}.gguf cannot draft for target.gguf: .*{message}"):
            LLM(target, backend="reference", memory=1 << 30, draft=str(draft))


def _tokens(reader: Any) -> list[bytes]:
    field = reader.fields["tokenizer.ggml.tokens"]
    return [bytes(field.parts[i]) for i in field.data]


def test_check_pair_gives_a_verdict_with_reasons(tmp_path: Path) -> None:
    target = tiny_gguf(tmp_path / "target.gguf", context_length=128)
    draft = tiny_gguf(tmp_path / "draft.gguf", context_length=64, n_layers=1, chat_template="{{ messages[0].content }}")
    report = weigh_pair(target, draft, backend="reference", memory=1 << 30)
    found = {finding.what.split(":")[0][:24]: finding.level for finding in report.findings}
    assert report.verdict == "doubtful"
    assert found["token tables are equal"] == "ok"
    assert [f.level for f in report.findings if "chat templates differ in conversation 1" in f.what] == ["warning"]
    assert [f.level for f in report.findings if "context (64) is shorter" in f.what] == ["warning"]
    assert report.speed_ratio == pytest.approx((report.draft_tok_s or 0) / (report.target_tok_s or 1))
    unfit = weigh_pair(target, tiny_gguf(tmp_path / "big.gguf", vocab_size=1200), memory=1 << 30)
    assert (unfit.verdict, unfit.speed_ratio) == ("unfit", None)


def test_a_doubtful_pair_is_named_in_its_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_gguf(tmp_path / "target.gguf", context_length=128)
    draft = tiny_gguf(tmp_path / "draft.gguf", context_length=64, n_layers=1, **NO_TEMPLATE)
    LLM(target, backend="reference", memory=1 << 30, draft=draft).close()
    said = [record.getMessage() for record in caplog.records]
    assert "draft.gguf as draft for target.gguf: the draft draft.gguf has no chat template" in said
    assert [line for line in said if "the draft's context (64) is shorter" in line and "draft.gguf as draft" in line]
    assert not [line for line in said if "this model" in line]


def test_check_pair_calls_models_what_the_user_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    file = tiny_gguf(tmp_path / "draft.gguf", context_length=64, n_layers=1, **NO_TEMPLATE)
    (tmp_path / "Modelfile").write_text(f"FROM {file}\n")
    assert main(["create", "small", "-f", str(tmp_path / "Modelfile")]) == 0
    target = tiny_gguf(tmp_path / "target.gguf", context_length=64)
    assert main(["check-pair", str(target), "small", "--backend", "reference", "--memory", "1G"]) == 0
    assert "warning the draft small has no chat template" in capsys.readouterr().out


def test_a_draft_may_be_any_path(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"context_length": 64, "chat_template": None}
    target = tiny_gguf(tmp_path / "target.gguf", **shape)
    draft = tiny_gguf(tmp_path / "a, b.gguf", n_layers=1, **shape)
    for given in (draft, str(draft), f"lookup,{target}"):
        with LLM(target, backend="reference", memory=1 << 30, draft=given) as llm:
            assert llm.engine.speculator is not None and llm.engine.speculator.model is not None


def test_drafts_that_are_none_are_refused(tmp_path: Path) -> None:
    target = tiny_gguf(tmp_path / "target.gguf", context_length=64, chat_template=None)
    with pytest.raises(EdgeLLMError, match=r"nothing\.gguf"):
        LLM(target, backend="reference", draft=tmp_path / "nothing.gguf")
    with pytest.raises(RequestError, match="one draft model at most"):
        LLM(target, backend="reference", draft=f"{target},other.gguf")
    with pytest.raises(RequestError, match="draft_max"):
        LLM(target, backend="reference", draft="lookup", draft_max=0)
    encoder = tiny_gguf(tmp_path / "encoder.gguf", "bert", context_length=64)
    with pytest.raises(DraftPairError, match=r"encoder\.gguf is an encoder"):
        LLM(target, backend="reference", memory=1 << 30, draft=encoder)
