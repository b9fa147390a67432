"""From the Metal text that MLX generates to one C++ translation unit that g++ compiles as it stands.

Nothing of a kernel's own text is rewritten except threadgroup variables, which must be one copy for all lanes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import mlx.core as mx

SHIM = Path(__file__).parent / "shim"
# A Metal literal 1.0 is a float and half arithmetic rounds each time; C++14 is what Metal 3 is based on.
# Locals start as garbage (0xfe bytes), not as the zeros of a fresh stack.
KERNEL_FLAGS = [
    *("-std=c++14", "-fsingle-precision-constant", "-fexcess-precision=16", "-ftrivial-auto-var-init=pattern"),
    *("-Wall", "-fno-exceptions", "-fno-rtti", "-Wno-attributes", "-Wno-sign-compare", "-Wno-unknown-pragmas"),
    *("-I", str(SHIM)),
]
NAMES = r"\w+\s*(?:\[[^\]]*\]\s*)*"
SHARED = re.compile(rf"\bthreadgroup\s+([\w:]+(?:<[^;(){{}}]*>)?)\s+({NAMES}(?:,\s*{NAMES})*);")
OTHER_SHARED = re.compile(r"\bthreadgroup\s+(?:(?:const|volatile)\s+)*(?!const\b|volatile\b)[\w:<>]+\s+\w+")
TYPES = r"(?:T|U|half|float|bool|void|u?char|u?short|u?int|u?long|u?int(?:8|16|32|64)_t|size_t)[234]?"
POINTER = re.compile(
    r"((?:\b(?:const|volatile|device|constant|threadgroup|thread)\s+)*)\b"
    + TYPES
    + r"(?:\s+(?:const|device|constant|threadgroup|thread))*\s*[*&](?!&)\s*(?:\w|\))"
)


class BuildError(Exception):
    """The text cannot be a Metal kernel: g++ or one of our own checks refused it."""


def generated(kernel, call: dict) -> tuple[str, str]:
    """(function name, Metal source) as MLX would hand them to the Metal compiler: exporting a function that calls the
    kernel records it without a GPU, signature and instantiation included."""
    seen: list[dict] = []
    inputs = call.pop("inputs")
    mx.export_function(seen.append, lambda *a: kernel(inputs=list(a), **call), *inputs)
    (primitive,) = [s for s in seen if s["type"] == "primitive" and s["name"] == "CustomKernel"]
    return primitive["arguments"][0], primitive["arguments"][1]


def _share(source: str, header: str) -> str:
    """The source with threadgroup variables made common to the lanes; what cannot be, is refused."""

    def one(found: re.Match) -> str:
        if source[: found.start()].count("{") != source[: found.start()].count("}"):
            raise BuildError(f"error: threadgroup variable inside a block: {found[0]}")
        names = re.findall(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)(?:,|$)", found[2])
        return "".join(f"MSL_SHARED({name}, {dims.strip()}, {found[1]}) " for name, dims in names)

    shared = SHARED.sub(one, source)
    for text in (header, shared):
        odd = OTHER_SHARED.search(re.sub(r"//[^\n]*", "", text))
        if odd:
            raise BuildError(f"error: threadgroup variable not at the top of a kernel, or initialised: {odd[0]}")
    return shared


def _arguments(parameters: str) -> tuple[list[str], list[str]]:
    """(buffer names, C++ arguments) of the generated signature."""
    buffers, passed = [], []
    for p in filter(None, (s.strip() for s in parameters.split(",\n"))):
        buffer = re.fullmatch(r"(?:const )?(?:device|constant) ([\w<>]+)([*&]) (\w+) \[\[buffer\((\d+)\)\]\]", p)
        index = re.fullmatch(r"(uint3?) (\w+) \[\[\2\]\]", p)
        if buffer:
            space = "constant" if " constant " in f" {p}" else "device"
            buffers.append(buffer[3])
            passed.append(f"{'' if buffer[2] == '*' else '*'}({space} {buffer[1]}*)msl_b[{buffer[4]}]")
        elif index and index[1] == "uint":
            passed.append(f"msl_i->{index[2]}")
        elif index:
            passed.append(f"uint3(msl_i->{index[2]}.x, msl_i->{index[2]}.y, msl_i->{index[2]}.z)")
        else:
            raise BuildError(f"parameter not understood: {p}")
    return buffers, passed


def translation_unit(function: str, text: str, header: str, source: str, label: str) -> tuple[str, list[str]]:
    """(C++ text with #line marks and an entry that calls the kernel, buffer names in argument order)."""
    if text.count(source) != 1 or not text.startswith(header):
        raise BuildError("the generated text does not hold the shipped source as it is")
    body = text.index(source)
    signature = text[len(header) : body]
    instance = re.search(r"decltype\((.*)\) \1;", text)
    start = signature.index(function + "(") + len(function) + 1
    buffers, passed = _arguments(signature[start : signature.rindex(")")])
    code = (
        f'#include "metal_shim.h"\n#line 1 "{label}_header.metal"\n{header}\n#line 1 "generated"\n{signature}'
        f'#line 1 "{label}.metal"\n{_share(source, header)}\n#line 1 "generated"\n{text[body + len(source) :]}\n'
        'extern "C" void msl_entry(void* const* msl_b, const msl_ids* msl_i) {\n'
        f"  {instance[1] if instance else function}({', '.join(passed)});\n}}\n"
    )
    return code, buffers


def _left_out(code: str) -> list[str]:
    """Variables outside functions that are not constant, recursion, lambdas."""
    found = []
    header = re.search(r'_header\.metal"\n(.*?)#line 1 "generated"', code, flags=re.S)
    text = re.sub(r"//[^\n]*|#[^\n]*|/\*.*?\*/", "", header[1] if header else "", flags=re.S)
    outside, depth, bodies, name = "", 0, {}, None
    for piece in re.split(r"([{}])", text):
        if piece in "{}":
            depth += (piece == "{") - (piece == "}")
            outside += ";" if depth == 0 else ""
        elif depth == 0:
            outside += piece
            name = re.search(r"(\w+)\s*\([^()]*\)\s*$", piece)
        elif name:
            bodies[name[1]] = bodies.get(name[1], "") + piece
    found += [f"recursion: {f}" for f, body in bodies.items() if re.search(rf"\b{f}\s*\(", body)]
    for statement in outside.split(";"):
        if re.search(r"=\s*$|=[^=]", statement) and not re.search(r"\bconstant\b|\(|\busing\b", statement):
            found.append(f"space: variable outside a function that is not constant: {' '.join(statement.split())}")
    if re.search(r"=\s*\[[^\]]*\]\s*\(", code):
        found.append("C++: lambda")
    return found


def check_spaces(code: str) -> list[str]:
    """What Metal would refuse and g++ takes: mistakes of address spaces, and C++ that Metal leaves out, as far as g++
    and patterns can see them."""
    found = _left_out(code)
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", code[: code.rindex('extern "C"')], flags=re.S)
    if re.search(r"\blong\s+long\b", text):
        found.append("type: long long")
    for pointer in POINTER.finditer(text):
        if not re.search(r"device|constant|threadgroup|thread", pointer[0]):
            found.append(f"space: no address space in `{' '.join(pointer[0].split())}`")
    for number, word in enumerate(("device", "constant", "threadgroup"), 1):
        if re.search(rf"\b{word}\b", text.replace("MSL_SHARED", "threadgroup")):
            flags = ["-Werror=cast-qual", f"-DMSL_CHECK_SPACE={number}", "-fsyntax-only", "-x", "c++", "-"]
            given = re.sub(r"\bconstant\s+constexpr\b", "constexpr", code)
            run = subprocess.run(["g++", *KERNEL_FLAGS, *flags], input=given, capture_output=True, text=True)
            found += [f"space ({word}): {line}" for line in run.stderr.splitlines() if "error:" in line]
    return found
