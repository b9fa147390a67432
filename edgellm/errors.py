"""Errors a user reads: each message is one line that names the thing and says what to do.

The CLI prints `str(error)` and exits with `exit_code`; the server answers `http_status` with the same text.
Anything that is not an `EdgeLLMError` is a bug of ours, and only then is a traceback the right answer.
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "CancelledError",
    "ContextLengthError",
    "DraftPairError",
    "EdgeLLMError",
    "GGUFError",
    "GrammarError",
    "MemoryBudgetError",
    "ModelNotFound",
    "PullError",
    "QueueFullError",
    "RequestError",
    "StoreError",
    "TemplateError",
    "TokenizerError",
    "UnsupportedModel",
]


class EdgeLLMError(Exception):
    """Base of all errors with a message meant for the user."""

    exit_code = 1
    http_status = 500


class GGUFError(EdgeLLMError):
    """A model file that is damaged, cut short, or not GGUF at all."""


class UnsupportedModel(EdgeLLMError):
    """A sound file whose architecture, tensors or quant types we cannot run; names what is missing."""


class TokenizerError(EdgeLLMError):
    """Tokenizer metadata that is missing, contradictory or of an unknown kind."""


class TemplateError(EdgeLLMError):
    """A chat template that does not compile, raised, or ran past its limits."""

    http_status = 400


class RequestError(EdgeLLMError):
    """A request that cannot be served as it stands (wrong type, out of range, unknown option)."""

    http_status = 400


class ContextLengthError(RequestError):
    """A prompt longer than the context. Carries both numbers. `answered`: whether an answer was wanted to it."""

    def __init__(self, n_prompt: int, n_ctx: int, message: str | None = None, answered: bool = True):
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx
        super().__init__(
            message
            or f"the prompt has {n_prompt} tokens but the context holds {n_ctx}"
            f"{' (one must stay free for the answer)' * answered}; shorten it or raise the context length"
        )


class GrammarError(RequestError):
    """A JSON schema, regex or grammar that does not compile; carries the compiler's reason."""


class MemoryBudgetError(EdgeLLMError):
    """What was asked for does not fit the memory budget; the message holds the numbers in bytes."""

    http_status = 400


class QueueFullError(EdgeLLMError):
    """Too many requests are waiting already."""

    http_status = 503


class CancelledError(EdgeLLMError):
    """The request was aborted by its owner."""

    http_status = 499


class ModelNotFound(EdgeLLMError):
    """No such file or stored model; the message holds the command that would bring it."""

    http_status = 404


class BackendUnavailable(EdgeLLMError):
    """A backend that cannot run here, with the reason."""


class DraftPairError(EdgeLLMError):
    """A draft model that cannot work for its target; shows the first difference."""

    http_status = 400


class PullError(EdgeLLMError):
    """A download that failed; says whether what came is kept and how to go on."""


class StoreError(EdgeLLMError):
    """The model store cannot be read or written."""
