"""Real models say what llama.cpp says: prompt ids, teacher-forced logprobs, perplexity.

The bounds are the goldens' own rule (argmax equal at 95% of steps, median difference 0.1, 99th percentile 0.7), as
llama.cpp rounds activations to 8 bits.
"""

from __future__ import annotations

import pytest

from edgellm.llm import LLM
from edgellm.measure.perplexity import measure_perplexity
from edgellm.tokenizer import from_gguf
from tests.support.real import agreement, real_cases, real_model, real_text

pytestmark = pytest.mark.real

MODELS = {
    # file: (stored answers, llama-perplexity on text.txt in windows of 512, windows)
    "smollm2.gguf": ("smollm2-135m-q4_1.json", 51.376, 17),
    "gemma3-270m.gguf": ("gemma3-270m-q4_k_m.json", 64.242, 16),
}


@pytest.mark.parametrize("name", MODELS)
def test_prompt_ids_are_equal(name: str) -> None:
    tokenizer = from_gguf(real_model(name))
    for case in real_cases(MODELS[name][0]):
        assert list(tokenizer.encode(case["prompt"], special=True)) == case["prompt_tokens"]


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_agree(name: str) -> None:
    with LLM(real_model(name), ctx=1024) as llm:
        found = agreement(real_cases(MODELS[name][0]), llm.logits)
    print(found)
    assert found.argmax_equal >= 0.95
    assert found.median <= 0.1
    assert found.percentile_99 <= 0.7


@pytest.mark.parametrize("name", MODELS)
def test_perplexity_is_llama_perplexitys(name: str) -> None:
    _, expected, windows = MODELS[name]
    with LLM(real_model(name), ctx=512) as llm:
        found = measure_perplexity(llm, real_text())
    print(found)
    assert found.n_tokens == 255 * windows
    assert abs(found.ppl / expected - 1) <= 0.007
