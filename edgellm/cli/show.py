"""`edgellm show`: what a model file holds. Reads the header only, and works for architectures that cannot run yet."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.opening import model_path, stored_model
from edgellm.cli.options import json_option
from edgellm.cli.render import terminal_text
from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.hub.store import StoredModel
    from edgellm.loader import GGUFFile

__all__ = ["describe", "show", "size_text"]

_SIZES = {
    # JSON key: the metadata key behind `<architecture>.`
    "context_length": "context_length",
    "embedding_length": "embedding_length",
    "layers": "block_count",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "sliding_window": "attention.sliding_window",
    "experts": "expert_count",
    "experts_used": "expert_used_count",
}


def size_text(n_bytes: float) -> str:
    """Bytes in decimal units, as disks and downloads count them: `1.24 GB`."""
    for unit in ("B", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.2f} GB"


def describe(gguf: GGUFFile) -> dict[str, Any]:
    """The facts `show` prints, ready for JSON. Missing metadata gives None, never an error."""
    metadata = gguf.metadata
    architecture = gguf.architecture
    types = Counter(tensor.type.name for tensor in gguf.tensors.values())
    facts: dict[str, Any] = {
        "name": metadata.get("general.name"),
        "architecture": architecture,
        "parameters": sum(math.prod(tensor.shape) for tensor in gguf.tensors.values()),
        "file_bytes": sum(path.stat().st_size for path in gguf.paths),
        "tensors": sum(types.values()),
        "quant_types": dict(types.most_common()),
    }
    facts |= {name: _size(metadata.get(f"{architecture}.{key}")) for name, key in _SIZES.items()}
    facts["supported"], facts["unsupported_reason"] = _supported(metadata)
    facts["tokenizer"] = _tokenizer(metadata)
    template = metadata.get("tokenizer.chat_template")
    facts["chat_template"] = template if isinstance(template, str) else None
    facts["license"] = metadata.get("general.license")
    return facts


def _size(value: Any) -> int | list[int] | None:
    """A whole number, or one per layer; None for what is neither."""
    if isinstance(value, int):
        return value
    numbers = list(value) if isinstance(value, Sequence) else []
    return numbers if numbers and all(isinstance(number, int) for number in numbers) else None


def _stored(model: StoredModel | None) -> dict[str, Any]:
    """What `edgellm create` or a pull stored beside the weights."""
    if model is None:
        return {}
    facts = {"options": model.params, "system": model.system, "messages": list(model.messages)}
    template = {"chat_template": model.template} if model.template is not None else {}
    return {**{key: value for key, value in facts.items() if value}, **template}


def _supported(metadata: Mapping[str, Any]) -> tuple[bool, str | None]:
    from edgellm.models import registry

    try:
        registry.config_from_metadata(metadata)
    except EdgeLLMError as error:
        return False, str(error)
    return True, None


def _tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sequence):
        return None
    keys = {"model": "model", "pre": "pre", "bos": "bos_token_id", "eos": "eos_token_id", "add_bos": "add_bos_token"}
    facts = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in keys.items()}
    return {**facts, "vocabulary": len(tokens)}


@click.command()
@click.argument("model")
@click.option("--template", is_flag=True, help="Print the chat template alone.")
@click.option("--modelfile", is_flag=True, help="Print a Modelfile that makes MODEL again.")
@json_option
def show(model: str, template: bool, modelfile: bool, as_json: bool) -> None:
    """Show what MODEL holds: architecture, sizes, quant types, context, tokenizer, template; of a stored model also
    its parameters and system message."""
    from edgellm.loader import open_gguf

    path, stored = model_path(model), stored_model(model)
    if modelfile:
        _write(_modelfile(model, stored))
        return
    with open_gguf(path) as gguf:
        facts = {**describe(gguf), **_stored(stored)}
    if as_json:
        click.echo(json.dumps({"path": str(path), **facts}))
    elif template:
        _write(f"{facts['chat_template'] or ''}\n")
    else:
        _print(path, facts)


def _write(text: str) -> None:
    """To a file or pipe as it is; `click.echo` would take escape sequences out."""
    sys.stdout.write(terminal_text(text) if sys.stdout.isatty() else text)


def _modelfile(name: str, model: StoredModel | None) -> str:
    from edgellm.hub.modelfile import Modelfile, format_modelfile

    if model is None:
        return format_modelfile(Modelfile(name))
    params, messages = dict(model.params or {}), list(model.messages)
    return format_modelfile(Modelfile(name, params, model.template, model.system, messages, list(model.license)))


def _print(path: Path, facts: dict[str, Any]) -> None:
    rows = [("file", str(path)), ("size", size_text(facts["file_bytes"]))]
    rows += [(key, str(facts[key])) for key in ("name", "architecture", "license") if facts[key] is not None]
    if not facts["supported"]:
        rows.append(("runs here", f"no: {facts['unsupported_reason']}"))
    rows.append(("parameters", f"{facts['parameters'] / 1e6:,.1f} M"))
    rows.append(("quant types", ", ".join(f"{name} x{n}" for name, n in facts["quant_types"].items())))
    rows += [(key.replace("_", " "), _number(facts[key])) for key in _SIZES if facts[key] is not None]
    if tokenizer := facts["tokenizer"]:
        kind = " / ".join(str(tokenizer[key]) for key in ("model", "pre") if tokenizer[key])
        rows.append(("tokenizer", f"{kind}, {tokenizer['vocabulary']:,} tokens"))
        rows.append(("begin / end id", f"{tokenizer['bos']} / {tokenizer['eos']}"))
    template = facts["chat_template"]
    lines = f"{len(template.splitlines())} lines (--template prints it)" if template else "none in the file"
    rows.append(("chat template", lines))
    for name, value in facts.get("options", {}).items():
        rows.append((name, json.dumps(value, ensure_ascii=False)))
    rows += [("system", facts["system"])] if "system" in facts else []
    rows += [(message["role"], message["content"]) for message in facts.get("messages", ())]
    for key, value in rows:
        click.echo(f"{key:<18} {terminal_text(value)}")


def _number(value: Any) -> str:
    return ", ".join(str(v) for v in value) if isinstance(value, list) else f"{value:,}"
