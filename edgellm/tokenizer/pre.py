"""How byte-level BPE vocabularies cut text into words before merging: one row per `tokenizer.ggml.pre` value.

A rule is a list of patterns applied one after the other: each cuts every piece left by the one before into its matches
and the gaps between them. Patterns are those of the model's own `tokenizer.json` (Oniguruma syntax), with which it was
trained; where llama.cpp approximates one (`tekken`, `gpt-4o`: it has no `\\p{Lu}`), ours is the original.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["RULES", "PreRule"]


@dataclass(frozen=True)
class PreRule:
    """`ignore_merges`: a word that is a token is taken whole. `add_bos`: default when the file does not say.
    `raw`: tokens hold UTF-8 with `▁` for a space and `<0xXX>` bytes, not GPT-2's byte letters."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    raw: bool = False


_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_JAIS2 = (
    rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
    r"|\s{1,2}(?!\S)|\s{1}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str) -> str:
    """Words cut where lower case turns to upper case (the o200k family)."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT4O = _cased(f"{_SUFFIX}?", r"\p{N}{1,3}")
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_ASCII_PUNCT = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCT}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CJK = r"[一-龥ࠀ-一가-퟿]+"
# Cased letters without the Georgian ones, as DeepSeek's hand-written list has them.
_DEEPSEEK_LETTERS = r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^ა-ჺჽ-ჿ]]+"
_KIMI_LEAD = r"[^\r\n\p{L}\p{N}]?"
_KIMI_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|{_KIMI_LEAD}{_KIMI_UPPER}*{_KIMI_LOWER}+{_SUFFIX}?|{_KIMI_LEAD}{_KIMI_UPPER}+{_KIMI_LOWER}*{_SUFFIX}?"
    rf"|\p{{N}}{{1,3}}|{_TAIL}"
)
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)

# Digits in groups of three counted from the right. First the run, then its short first group, then the threes: one
# look at the whole run, where the usual lookahead takes one per group and so quadratic time.
_GROUPED = (r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)", r"\p{N}{1,3}")
_GROUPED_AT_BOUNDARY = (r"(?<!\d)\d++\b", r"\A\d{1,2}(?=(?:\d{3})+\z)", r"\d{1,3}")

_DIGITS_GPT2 = PreRule((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreRule((_GPT2,))
_PLAIN_QWEN2 = PreRule((_QWEN2,))
_PLAIN_LLAMA3 = PreRule((_LLAMA3,))
_META_LLAMA3 = PreRule((_LLAMA3,), ignore_merges=True, add_bos=True)
_DEEPSEEK3_RULE = PreRule((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
_O200K = PreRule((_GPT4O,))
_AYA = PreRule((*_GROUPED_AT_BOUNDARY, _GPT4O))
_NEWLINES = PreRule((r"[^\n]+|\n+",), raw=True)
_BLOOM_RULE = PreRule((_BLOOM,))
_BAILING = PreRule(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_FALCON_PUNCT = r"[\p{P}\$\+<=>\^~\|`]+"

RULES: dict[str, PreRule] = {
    # llama.cpp's own default, for files that do not say: no model was trained with it.
    "default": PreRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "deepseek-llm": PreRule(
        (
            r"[\r\n]",
            _DEEPSEEK_LETTERS,
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "falcon": PreRule((_FALCON_PUNCT, _GPT2, r"[0-9][0-9][0-9]")),
    "jais-2": PreRule((_JAIS2,)),
    "tekken": PreRule((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "chameleon": PreRule(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "superbpe": PreRule(_GROUPED),
    "seed-coder": PreRule((rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    "ufakzeka": PreRule((rf"{_WORD}|\p{{N}}|{_TAIL}",)),
    "kimi-k2": PreRule((_KIMI,)),
    "afmoe": PreRule((*_GROUPED, _AFMOE_SCRIPTS, _DEEPSEEK3)),
    "laguna": PreRule((r"[^\n]+|\n+", _QWEN2)),
    "exaone-moe": PreRule(
        (
            rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "spark2_5": PreRule(
        (
            r"\p{N}{1,3}",
            _CJK,
            rf"{_ASCII_PUNCT}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "youtu": PreRule(
        (
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            _cased(f"{_SUFFIX}?", r"\p{N}"),
        ),
        ignore_merges=True,
    ),
    "minicpm5": PreRule((r"\p{N}{1,3}", rf"{_SUFFIX}|{_WORD}|\p{{N}}+|{_TAIL}"), ignore_merges=True),
    "granite-embed-multi-97m": replace(_O200K, ignore_merges=True),
    "gemma4": replace(_NEWLINES, add_bos=True),
    "granite-embed-multi-311m": replace(_NEWLINES, add_bos=True),
    "sarvam-moe": _NEWLINES,
    "mmbert": _NEWLINES,
    "viking": PreRule((_BLOOM, r"\p{N}")),
    "qwen35": PreRule((_QWEN35,)),
}

_SHARED: tuple[tuple[PreRule, str], ...] = (
    (_META_LLAMA3, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
    (_PLAIN_LLAMA3, "dbrx smaug-bpe chatglm-bpe glm4 glm5"),
    (_DIGITS_GPT2, "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (
        _PLAIN_GPT2,
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
        "modern-bert mpt olmo jais trillion granite-docling exaone4",
    ),
    (_PLAIN_QWEN2, "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2"),
    (_DEEPSEEK3_RULE, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (_O200K, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (_AYA, "tiny_aya cohere2moe"),
    (_BLOOM_RULE, "poro-chat bloom gpt3-finnish"),
    (_BAILING, "bailingmoe bailingmoe2 llada-moe"),
)
RULES.update({name: rule for rule, names in _SHARED for name in names.split()})
