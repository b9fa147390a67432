"""How families of models write thoughts and tool calls, and which family a chat template belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgellm.chat import call_bodies as bodies
from edgellm.chat.call_bodies import Reader
from edgellm.tokenizer import Tokenizer

__all__ = ["ReplyFormat", "ToolSyntax", "detect"]


@dataclass(frozen=True)
class ToolSyntax:
    """Calls stand between `opener` and `closer` (empty: to the end of the reply). `inner`: marks inside them.

    `bare`: calls may also be the whole reply, as a JSON object without marks (Llama 3). `in_json`: arguments are JSON:
    their strings may hold the closer, and a body that ends without it still shows whether it is whole.
    """

    opener: str
    closer: str
    read: Reader
    inner: tuple[str, ...] = ()
    bare: bool = False
    in_json: bool = False


@dataclass(frozen=True)
class ReplyFormat:
    """A family. `think`: opening and closing tag of thoughts, None where there are none. `noise`: marks around the
    answer that are no text. `harmony`: channels instead of tags (gpt-oss)."""

    name: str
    syntaxes: tuple[ToolSyntax, ...] = ()
    think: tuple[str, str] | None = None
    noise: tuple[str, ...] = ()
    harmony: bool = False

    def shown(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Control tokens that the parser has to see in the text."""
        marks = [mark for syntax in self.syntaxes for mark in (syntax.opener, syntax.closer, *syntax.inner)]
        parts = (tokenizer.split_specials(mark) for mark in (*marks, *(self.think or ()), *self.noise))
        return frozenset(part for mark in parts for part in mark if isinstance(part, int))


HERMES = ToolSyntax("<tool_call>", "</tool_call>", bodies.json_calls, in_json=True)
LLAMA3 = ToolSyntax("<|python_tag|>", "", lambda b, t: bodies.json_calls(b, t) or bodies.python_calls(b, t), bare=True)
MISTRAL = ToolSyntax("[TOOL_CALLS]", "", bodies.mistral, inner=("[ARGS]", "[CALL_ID]"))
DEEPSEEK = ToolSyntax(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    bodies.deepseek,
    inner=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    in_json=True,
)
DSML = ToolSyntax("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", bodies.dsml, inner=("｜DSML｜",))
KIMI = ToolSyntax(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    bodies.kimi,
    inner=("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    in_json=True,
)
COMMAND_R = ToolSyntax("<|START_ACTION|>", "<|END_ACTION|>", bodies.json_calls, in_json=True)
GEMMA4 = ToolSyntax("<|tool_call>", "<tool_call|>", bodies.gemma_call, inner=('<|"|>',))
FUNCTION_GEMMA = ToolSyntax("<start_function_call>", "<end_function_call>", bodies.gemma_call, inner=("<escape>",))

LFM2 = ToolSyntax("<|tool_call_start|>", "<|tool_call_end|>", bodies.python_calls)
PHI4 = ToolSyntax("<|tool_call|>", "<|/tool_call|>", bodies.json_calls, in_json=True)
GRANITE = ToolSyntax("<|tool_call|>", "", bodies.json_calls)
NEMOTRON = ToolSyntax("<TOOLCALL>", "</TOOLCALL>", bodies.json_calls, in_json=True)
GLM = ToolSyntax("<tool_call>", "</tool_call>", bodies.glm)
QWEN_CODER = ToolSyntax("<tool_call>", "</tool_call>", bodies.functions_xml)
SEED = ToolSyntax("<seed:tool_call>", "</seed:tool_call>", bodies.functions_xml)
MINIMAX = ToolSyntax("<minimax:tool_call>", "</minimax:tool_call>", bodies.invoke_xml)
NEMOTRON_MINI = ToolSyntax("<toolcall>", "</toolcall>", bodies.json_calls, in_json=True)
FUNCTIONARY = ToolSyntax("<function", "</function>", bodies.name_then_json, in_json=True)
FIREFUNCTION = ToolSyntax("functools", "", bodies.json_calls)
TOOL_CALLS = ToolSyntax("<tool_calls>", "</tool_calls>", bodies.json_calls, in_json=True)
APERTUS = ToolSyntax("<|tools_prefix|>", "<|tools_suffix|>", bodies.name_to_arguments, in_json=True)
SOLAR = ToolSyntax(
    "<|tool_calls|>",
    "",
    bodies.solar,
    inner=("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
)
COMMAND_R_PLUS = ToolSyntax("Action:\n```json\n", "```", bodies.json_calls)
TOOL_CODE = ToolSyntax("```tool_code\n", "```", bodies.python_calls)

# Marks in a template's text, the syntax they belong to; the first that fits wins, so the most telling come first.
_SYNTAXES: tuple[tuple[str, str, ToolSyntax], ...] = (
    ("deepseek-v3.2", r"｜DSML｜", DSML),
    ("deepseek", r"<｜tool▁calls▁begin｜>", DEEPSEEK),
    ("kimi", r"<\|tool_calls_section_begin\|>", KIMI),
    ("command-r", r"<\|START_ACTION\|>", COMMAND_R),
    ("gemma4", r"<\|tool_call>", GEMMA4),
    ("function-gemma", r"<start_function_call>", FUNCTION_GEMMA),
    ("minimax", r"<minimax:tool_call>", MINIMAX),
    ("seed", r"<seed:tool_call>", SEED),
    ("qwen-coder", r"<tool_call>.*<function=|<function=.*<tool_call>", QWEN_CODER),
    ("glm", r"<arg_key>", GLM),
    ("lfm2", r"<\|tool_call_start\|>|<\|tool_list_start\|>|<\|tool_response_start\|>|List of tools: \[", LFM2),
    ("apertus", r"<\|tools_prefix\|>", APERTUS),
    ("solar", r"<\|tool_call:begin\|>", SOLAR),
    ("command-r-plus", r"Action:\\n```json", COMMAND_R_PLUS),
    ("tool-calls", r"<tool_calls>", TOOL_CALLS),
    ("phi4", r"<\|/tool_call\|>|<\|/tool\|>", PHI4),
    ("granite", r"<\|tool_call\|>", GRANITE),
    ("nemotron", r"<TOOLCALL>", NEMOTRON),
    ("nemotron-mini", r"<extra_id_1>Tool", NEMOTRON_MINI),
    ("hermes", r"<tool_call>", HERMES),
    ("mistral", r"\[TOOL_CALLS\]", MISTRAL),
    ("functionary-v3.1", r"<function=", FUNCTIONARY),
    ("firefunction", r"functools\[", FIREFUNCTION),
    ("tool-code", r"```tool_code", TOOL_CODE),
    ("llama3", r"<\|python_tag\|>|Environment: ipython|<\|start_header_id\|>.*\btools\b", LLAMA3),
)
_THINK_TAGS = (
    ("<think>", "</think>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<reasoning>", "</reasoning>"),
)
# What tells the marks around an answer (MiniMax's `<response>` is that of a tool), and the marks.
_ANSWER_TAGS = (
    ("<|START_RESPONSE|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    ("<response></response>", ("<response>", "</response>")),
)
_CHANNEL_THOUGHT = ("<|channel>thought\n", "<channel|>")


def detect(source: str) -> ReplyFormat:
    """The family of a template. Templates that speak of tools without a syntax we know get the Hermes one and bare
    JSON, which models fall back to."""
    if "<|channel|>" in source and "<|message|>" in source:
        return ReplyFormat("harmony", harmony=True)
    think = next((tags for tags in _THINK_TAGS if tags[1] in source), None)
    if "<|channel>" in source:
        think = _CHANNEL_THOUGHT
    noise = next((tags for sign, tags in _ANSWER_TAGS if sign in source), ())
    for name, pattern, syntax in _SYNTAXES:
        if re.search(pattern, source, re.S):
            return ReplyFormat(name, (syntax,), think, noise)
    if re.search(r"\btools\b", source):
        return ReplyFormat("json", (HERMES, LLAMA3), think, noise)
    return ReplyFormat("plain", (), think, noise)
