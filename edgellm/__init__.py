"""edgellm: a language-model engine for one person's machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellm.config import SamplingParams
    from edgellm.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazy: `import edgellm` must stay as fast as an empty Python.
    if name == "LLM":
        from edgellm.llm import LLM

        return LLM
    if name == "SamplingParams":
        from edgellm.config import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'edgellm' has no attribute {name!r}")
