"""What stands between the marks of a tool call, per dialect: text to (name, arguments) pairs, or None if malformed.

Each reader takes the whole body and the tools of the request (JSON Schema types decide whether an XML value is text).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "Call",
    "Tools",
    "deepseek",
    "dsml",
    "functions_xml",
    "gemma_call",
    "glm",
    "invoke_xml",
    "is_open_json",
    "json_calls",
    "kimi",
    "mistral",
    "name_then_json",
    "name_to_arguments",
    "python_calls",
    "solar",
]

Call = tuple[str, dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Reader = Callable[[str, Tools], "list[Call] | None"]


def json_calls(body: str, tools: Tools) -> list[Call] | None:
    """One object, a list of them, or several in a row (also with `;` between): {"name", "arguments" | "parameters"}."""
    values: list[Any] = []
    decoder = json.JSONDecoder(strict=False)
    at = 0
    try:
        while at < len(body):
            if body[at] in " \n\t\r;,":
                at += 1
                continue
            value, at = decoder.raw_decode(body, at)
            values += value if isinstance(value, list) else [value]
    except (ValueError, RecursionError):
        return None
    calls = [_from_object(value) for value in values]
    return [call for call in calls if call is not None] if calls and None not in calls else None


def is_open_json(body: str) -> bool:
    """Whether `body` ends inside a JSON string, so that a closing mark seen there belongs to the string."""
    return len(re.findall(r'(?<!\\)(?:\\\\)*"', body)) % 2 == 1


def name_then_json(body: str, tools: Tools) -> list[Call] | None:
    """`name` and a JSON object behind it, as in `name\\n{...}`, `name{...}` or `=name>{...}`."""
    found = re.match(r"\s*=?([\w.\-]+)>?\s*(\{.*)", body, re.S)
    return _named(found.group(1), found.group(2)) if found else None


def mistral(body: str, tools: Tools) -> list[Call] | None:
    """A list of objects, or `name[ARGS]{...}` (with `[CALL_ID]id` between), several behind further [TOOL_CALLS]."""
    calls: list[Call] = []
    for part in body.split("[TOOL_CALLS]"):
        if not part.strip():
            continue
        read = json_calls(part, tools)
        if read is None:
            found = re.fullmatch(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(\{.*)", part, re.S)
            read = _named(found.group(1), found.group(2)) if found else None
        if read is None:
            return None
        calls += read
    return calls or None


def deepseek(body: str, tools: Tools) -> list[Call] | None:
    """V3, R1: `function<｜tool▁sep｜>name` and fenced JSON; V3.1: `name<｜tool▁sep｜>{...}`; in call marks."""
    calls: list[Call] = []
    for part in re.split(r"<｜tool▁call▁begin｜>|<｜tool▁call▁end｜>", body):
        if not part.strip():
            continue
        found = re.fullmatch(r"\s*(?:function<｜tool▁sep｜>)?([\w.\-]+)(?:<｜tool▁sep｜>)?\s*(.*)", part, re.S)
        text = re.sub(r"^```(?:json)?\s*|\s*```\s*$", "", found.group(2).strip()) if found else ""
        read = _named(found.group(1), text) if found else None
        if read is None:
            return None
        calls += read
    return calls or None


def kimi(body: str, tools: Tools) -> list[Call] | None:
    """`functions.name:0<|tool_call_argument_begin|>{...}` in call marks."""
    calls: list[Call] = []
    for part in re.split(r"<\|tool_call_begin\|>|<\|tool_call_end\|>", body):
        if not part.strip():
            continue
        found = re.fullmatch(
            r"\s*(?:functions\.)?([\w.\-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*)", part, re.S
        )
        read = _named(found.group(1), found.group(2)) if found else None
        if read is None:
            return None
        calls += read
    return calls or None


def name_to_arguments(body: str, tools: Tools) -> list[Call] | None:
    """A list of objects with the name as key, `[{"f": {"x": 1}}]` (Apertus)."""
    try:
        values = json.loads(body, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        return None
    calls = [(name, arguments) for value in values for name, arguments in value.items()]
    return calls if calls and all(isinstance(arguments, dict) for _, arguments in calls) else None


def solar(body: str, tools: Tools) -> list[Call] | None:
    """`id<|tool_call:name|>name<|tool_call:args|>{...}` in call marks."""
    calls: list[Call] = []
    for part in re.split(r"<\|tool_call:begin\|>|<\|tool_call:end\|>", body):
        if not part.strip():
            continue
        found = re.fullmatch(r".*?<\|tool_call:name\|>\s*([\w.\-]+)\s*<\|tool_call:args\|>(.*)", part, re.S)
        read = _named(found.group(1), found.group(2)) if found else None
        if read is None:
            return None
        calls += read
    return calls or None


def functions_xml(body: str, tools: Tools) -> list[Call] | None:
    """`<function=name><parameter=key>value</parameter></function>` (Qwen3-Coder, Seed-OSS); JSON objects pass too."""
    blocks = re.findall(r"<function=([^>\n]+)>(.*?)</function>", body, re.S)
    if not blocks or re.sub(r"<function=([^>\n]+)>(.*?)</function>", "", body, flags=re.S).strip():
        return json_calls(body, tools)
    calls = []
    for name, inside in blocks:
        pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", inside, re.S)
        calls.append(
            (name.strip(), {key.strip(): _typed(value, name.strip(), key.strip(), tools) for key, value in pairs})
        )
    return calls


def invoke_xml(body: str, tools: Tools) -> list[Call] | None:
    """`<invoke name="f"><parameter name="key">value</parameter></invoke>` (MiniMax)."""
    calls = []
    for name, inside in re.findall(r'<invoke name="([^"]+)">(.*?)</invoke>', body, re.S):
        pairs = re.findall(r'<parameter name="([^"]+)">(.*?)</parameter>', inside, re.S)
        calls.append((name, {key: _typed(value, name, key, tools) for key, value in pairs}))
    return calls or None


def dsml(body: str, tools: Tools) -> list[Call] | None:
    """DeepSeek V3.2: as `invoke_xml` with `｜DSML｜` in each tag, and `string="true"` on texts."""
    calls = []
    for name, inside in re.findall(r'<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>', body, re.S):
        arguments: dict[str, Any] = {}
        pattern = r'<｜DSML｜parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</｜DSML｜parameter>'
        for key, is_text, value in re.findall(pattern, inside, re.S):
            arguments[key] = value if is_text == "true" else _typed(value, name, key, tools)
        calls.append((name, arguments))
    return calls or None


def glm(body: str, tools: Tools) -> list[Call] | None:
    """`name` and `<arg_key>k</arg_key><arg_value>v</arg_value>` pairs; JSON objects pass too."""
    name, _, rest = body.strip().partition("<arg_key>")
    name = name.strip()
    if not re.fullmatch(r"[\w.\-]+", name):
        return json_calls(body, tools)
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", "<arg_key>" + rest, re.S)
    return [(name, {key.strip(): _typed(value, name, key.strip(), tools) for key, value in pairs})]


def gemma_call(body: str, tools: Tools) -> list[Call] | None:
    """`call:name{key:<|"|>text<|"|>,n:3}` (Gemma 4; FunctionGemma marks texts with `<escape>`)."""
    found = re.fullmatch(r"\s*call:([\w.\-]+)\s*(\{.*\})\s*", body, re.S)
    if not found:
        return json_calls(body, tools)
    parts = re.split(r'<\|"\|>|<escape>', found.group(2))
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = json.dumps(part)
        else:  # keys stand without quotes
            parts[i] = re.sub(r"([{,]\s*)([^\s\"{},:\[\]][^\"{},:\[\]]*?)\s*:", r'\1"\2":', part)
    return _named(found.group(1), "".join(parts)) if len(parts) % 2 else None


def python_calls(body: str, tools: Tools) -> list[Call] | None:
    """`[f(x="y", n=3), g()]` or one call a line: literals only, nothing is run."""
    text = body.strip()
    try:
        tree = ast.parse(
            text if text.startswith("[") else f"[{','.join(filter(str.strip, text.splitlines()))}]", mode="eval"
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(tree.body, ast.List) or not tree.body.elts:
        return None
    calls = []
    for node in tree.body.elts:
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            return None
        name = ast.unparse(node.func).removesuffix(".call")
        try:
            calls.append((name, {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}))
        except ValueError:
            return None
    return calls


def _from_object(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") or value.get("tool_name") or value.get("function")
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
    return (name, arguments) if isinstance(name, str) and name and isinstance(arguments, dict) else None


def _named(name: str, text: str) -> list[Call] | None:
    try:
        arguments = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return [(name, arguments)] if isinstance(arguments, dict) else None


def _typed(value: str, name: str, key: str, tools: Tools) -> Any:
    """A value of an XML dialect: text where the tool's schema says so, else JSON if it is some."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            schema = ((function.get("parameters") or {}).get("properties") or {}).get(key) or {}
            if schema.get("type") == "string":
                return value
    try:
        return json.loads(value, strict=False)
    except (ValueError, RecursionError):
        return value
