"""The engine on the Metal backend (plain ops here): batches, chunks, prefix hits, windows and drafts give the ids that
one request alone gives, wherever the golden's margin is clear of rounding."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed (pip install 'edgellm[mlx]')")

from edgellm import LLM, SamplingParams
from tests.support.goldens import Golden

GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_batch_prefix_and_drafts_on_metal(name: str) -> None:
    golden = Golden(name)
    prompts = [golden.prompt, golden.ids(2), golden.ids(2)[:70] + golden.ids(1)]
    with LLM(golden.path(), backend="metal", kv_type="f32") as llm:
        alone = [llm.generate([p], GREEDY)[0] for p in prompts]
        assert alone[0].ids == golden.greedy
        together = llm.generate(prompts, GREEDY)
        for one, many in zip(alone, together, strict=True):
            assert many.ids == one.ids
            np.testing.assert_allclose([t.logprob for t in many.logprobs], [t.logprob for t in one.logprobs], atol=2e-3)
        again = llm.generate([prompts[1] + alone[1].ids[:-1]], SamplingParams(max_tokens=1, temperature=0))[0]
        assert again.cached_tokens > 0
        assert again.ids == alone[1].ids[-1:]
    with LLM(golden.path(), backend="metal", kv_type="f32", draft="lookup") as llm:
        assert llm.generate([golden.prompt], GREEDY)[0].ids == golden.greedy
