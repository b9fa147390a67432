"""OpenAI's chat and completion bodies as jobs, and what both answers share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from edgellm.errors import RequestError
from edgellm.server.body import Whole, Wire
from edgellm.server.job import Finish, Job, OutputFormat
from edgellm.server.messages import ChatMessage, Tool, to_tools, to_turns

__all__ = ["ChatBody", "CompletionBody", "allowed_tools", "chat_job", "completion_jobs", "effort_to_think"]
__all__ += ["open_sampling", "response_format", "stop_texts", "tool_choice", "top_count", "usage"]

MAX_COUNT = 16
MAX_CHOICES = 128
"""Answers to one request: prompts times `n`."""
_EFFORTS: dict[str, bool | str] = {
    "none": False,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "max": "max",
    "xhigh": "max",
    "ultra": "max",
}


class StreamOptions(Wire):
    """`stream_options`."""

    include_usage: bool | None = None


class Reasoning(Wire):
    """`reasoning` of chat completions and responses."""

    effort: str | None = None


class SamplingBody(Wire):
    """Fields that chat and text completions share."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Whole | None = None
    max_tokens: Whole | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Whole | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Whole | None = None


def effort_to_think(effort: str | None) -> bool | str | None:
    """A reasoning effort in Ollama's terms. Raises RequestError for an unknown one."""
    if effort is None:
        return None
    if effort not in _EFFORTS:
        raise RequestError(f"reasoning effort must be one of {', '.join(_EFFORTS)}, not {effort!r}")
    return _EFFORTS[effort]


def response_format(value: dict[str, Any] | None) -> OutputFormat | None:
    """`response_format` as a constraint: text, json_object, json_schema; and ours: regex, lark, gbnf."""
    if value is None:
        return None
    kind = value.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return OutputFormat("json")
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise RequestError("response_format.json_schema.schema must be a JSON Schema object")
        return OutputFormat("schema", schema)
    if kind in ("regex", "lark", "gbnf"):
        if not isinstance(value.get(kind), str):
            raise RequestError(f"response_format.{kind} must be a string")
        return OutputFormat(kind, value[kind])
    raise RequestError(
        f"response_format.type must be text, json_object, json_schema, regex, lark or gbnf, not {kind!r}"
    )


def sampling(body: SamplingBody) -> dict[str, Any]:
    """Sampling fields of a body."""
    found = open_sampling(body.temperature, body.top_p)
    if body.max_tokens is not None:
        found["max_tokens"] = _limit("max_tokens", body.max_tokens)
    for name in ("top_k", "min_p", "frequency_penalty", "presence_penalty"):
        if getattr(body, name) is not None:
            found[name] = getattr(body, name)
    if body.seed is not None and body.seed >= 0:
        found["seed"] = body.seed
    if body.stop:
        found["stop"] = stop_texts([body.stop] if isinstance(body.stop, str) else body.stop)
    if body.logit_bias:
        found["logit_bias"] = _logit_bias(body.logit_bias)
    return found


def open_sampling(temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """Both are 1 where a request says nothing, whatever the model's own are: OpenAI's and Anthropic's rule."""
    return {
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
    }


def stop_texts(given: list[str]) -> tuple[str, ...]:
    """Stop strings; an empty one, which some clients send for none, stops nothing."""
    return tuple(text for text in given if text)


def _limit(name: str, value: int) -> int:
    """A token limit; -1, which some clients send, means none."""
    if value < -1:
        raise RequestError(f"{name} must be 0 or more (-1: no limit), not {value}")
    return value


def top_count(value: int | None) -> int:
    """How many alternatives to each token are told beside its logprob."""
    top = value or 0
    if not 0 <= top <= 20:
        raise RequestError(f"top_logprobs must lie between 0 and 20, not {top}")
    return top


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 9:
            raise RequestError(f"logit_bias: {key!r} is not a token id")
        if not math.isfinite(value) or abs(value) > 100:
            raise RequestError(f"logit_bias of token {key} must lie between -100 and 100, not {value}")
        bias[int(key)] = value
    return bias


def _count(body: SamplingBody) -> int:
    count = 1 if body.n is None else body.n
    if not 1 <= count <= MAX_COUNT:
        raise RequestError(f"n must lie between 1 and {MAX_COUNT}, not {count}")
    return count


def _named(tool: dict[str, Any]) -> Any:
    """The name in a choice of a tool; whatever stands there. Chat completions nest what responses do not."""
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else tool.get("name")


def allowed_tools(
    value: str | dict[str, Any] | None, tools: tuple[dict[str, Any], ...]
) -> tuple[str | dict[str, Any] | None, tuple[dict[str, Any], ...]]:
    """The choice and the tools that are left where the choice is of type `allowed_tools`; else as given."""
    if not isinstance(value, dict) or value.get("type") != "allowed_tools":
        return value, tools
    inner = value.get("allowed_tools", value)
    listed = inner.get("tools") if isinstance(inner, dict) else None
    if not isinstance(listed, list) or any(not isinstance(tool, dict) for tool in listed):
        raise RequestError("tool_choice of type allowed_tools needs a list of tools")
    names = [_named(tool) for tool in listed]
    for name in names:
        if all(tool["function"]["name"] != name for tool in tools):
            raise RequestError(f"tool_choice allows {name!r}, which is not among the tools")
    return inner.get("mode"), tuple(tool for tool in tools if tool["function"]["name"] in names)


def tool_choice(value: str | dict[str, Any] | None, tools: tuple[dict[str, Any], ...]) -> str:
    """`auto`, `none`, `required`, or `=NAME`."""
    if isinstance(value, dict):
        name = _named(value)
        if all(tool["function"]["name"] != name for tool in tools):
            raise RequestError(f"tool_choice names {name!r}, which is not among the tools")
        return f"={name}"
    choice = value or "auto"
    if choice not in ("auto", "none", "required"):
        raise RequestError(f"tool_choice must be none, auto, required or a function, not {choice!r}")
    if choice == "required" and not tools:
        raise RequestError("tool_choice is required but there are no tools")
    return choice


def chat_job(body: ChatBody) -> Job:
    """A chat completion request as a job. Raises RequestError that names what is wrong."""
    if not body.messages:
        raise RequestError("messages: at least one message is needed")
    choice, tools = allowed_tools(body.tool_choice, to_tools(body.tools))
    fields = sampling(body)
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = _limit("max_completion_tokens", body.max_completion_tokens)
    top = top_count(body.top_logprobs)
    if body.logprobs:
        fields["logprobs"] = top
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    return Job(
        model=body.model,
        messages=tuple(to_turns(body.messages, body.model, strict_null=True)),
        tools=tools,
        tool_choice=tool_choice(choice, tools),
        think=effort_to_think(effort),
        format=response_format(body.response_format),
        sampling=fields,
        count=_count(body),
    )


def completion_jobs(body: CompletionBody) -> list[Job]:
    """A text completion request as one job per prompt: text goes through the chat template as one user turn, as in
    Ollama; token ids and fill-in-the-middle go to the model as they are."""
    prompts, count = _prompts(body.prompt), _count(body)
    if not prompts:
        raise RequestError("prompt: at least one text or list of token ids is needed")
    if len(prompts) * count > MAX_CHOICES:
        raise RequestError(f"at most {MAX_CHOICES} choices per request, not {len(prompts)} prompts times n = {count}")
    if body.suffix and not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("suffix goes with a prompt in text, not with token ids")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo and logprobs do not go together here: logprobs are of the answer's tokens only")
    fields = sampling(body)
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
    job = Job(
        model=body.model,
        suffix=body.suffix or None,
        echo=bool(body.echo),
        think=False,
        sampling=fields,
        count=count,
    )
    return [
        replace(job, prompt=prompt)
        if isinstance(prompt, tuple) or body.suffix
        else replace(job, messages=({"role": "user", "content": prompt},))
        for prompt in prompts
    ]


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[str | tuple[int, ...]]:
    """Each prompt as text or as ids."""
    if isinstance(given, str):
        return [given]
    ids = tuple(item for item in given if isinstance(item, int))
    if ids:
        return [ids]
    return [tuple(item) if isinstance(item, list) else str(item) for item in given]


def usage(finishes: list[Finish], n_prompts: int = 1) -> dict[str, Any]:
    """OpenAI's usage of answers in the order of their prompts, equally many to each; a prompt counts whole and once,
    cached tokens included."""
    firsts = finishes[:: max(1, len(finishes) // n_prompts)]
    prompt = sum(finish.prompt_tokens for finish in firsts)
    new = sum(finish.new_tokens for finish in finishes)
    details: dict[str, Any] = {"cached_tokens": sum(finish.cached_tokens for finish in firsts)}
    if reason := next((finish.miss_reason for finish in firsts if finish.miss_reason), None):
        details["miss_reason"] = reason
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": sum(finish.reasoning_tokens for finish in finishes)},
    }
