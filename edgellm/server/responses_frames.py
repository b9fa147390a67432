"""Answers of /v1/responses: the response object and its numbered events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from edgellm.server.errors import error_body
from edgellm.server.frames import SSE, dumps, sse
from edgellm.server.job import Delta, Finish, Job, ToolCall, merged, new_id
from edgellm.server.openai_frames import token_logprobs

__all__ = ["ResponseFrames"]


class ResponseFrames:
    """One response. Items are opened and closed as the kind of output changes; every event is numbered."""

    media_type = SSE

    def __init__(
        self,
        job: Job,
        instructions: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        text_format: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ):
        self.job = job
        self.id = new_id("resp_")
        self.created = int(time.time())
        self.instructions = instructions
        self.text_format = text_format or {"type": "text"}
        self.tools = tools or []
        self.metadata = metadata or {}
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        """Of the open message's tokens; `_n_told`: how many of them were told."""
        self._n_told = 0
        self._number = -1

    def open(self) -> list[bytes]:
        """The two events that announce the response."""
        response = self._response("in_progress", None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def push(self, delta: Delta) -> list[bytes]:
        """Reasoning, text and calls, each as its own item."""
        frames: list[bytes] = []
        if delta.thinking:
            frames += self._piece("reasoning", delta.thinking)
        if _is_text(delta):
            self._logprobs += token_logprobs(delta.logprobs)
        if delta.content:
            frames += self._piece("message", delta.content)
        for call in delta.tool_calls:
            frames += self._call(call)
        if delta.finish is not None:
            frames += self._end_item()
            status, kind = _ending(delta.finish)
            frames.append(self._event(kind, response=self._response(status, delta.finish)))
        return frames

    def close(self) -> list[bytes]:
        """The completed event was the last one."""
        return []

    def fail(self, status: int, message: str) -> list[bytes]:
        """The event that ends a stream that broke."""
        response = self._response("failed", None)
        error = error_body("openai", status, message)["error"]
        response["error"] = {"code": error["code"] or "server_error", "message": message}
        return [self._event("response.failed", response=response)]

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The single object of a request that does not stream."""
        answer = merged(deltas)
        assert answer.finish is not None
        if answer.thinking:
            self.output.append(_reasoning(new_id("rs_"), answer.thinking))
        if answer.content or not answer.tool_calls:
            entries = merged([delta for delta in deltas if _is_text(delta)]).logprobs
            self.output.append(_message(new_id("msg_"), answer.content, "completed", token_logprobs(entries)))
        self.output += [_function_call(new_id("fc_"), call, dumps(call.arguments)) for call in answer.tool_calls]
        return self._response(_ending(answer.finish)[0], answer.finish)

    def _piece(self, kind: str, text: str) -> list[bytes]:
        frames = []
        if self._open is None or self._open["type"] != kind:
            frames = self._end_item()
            frames += self._begin_item(kind)
        self._text.append(text)
        if kind == "reasoning":
            frames.append(
                self._event("response.reasoning_summary_text.delta", **self._where("summary_index"), delta=text)
            )
        else:
            where = self._where("content_index")
            news, self._n_told = self._logprobs[self._n_told :], len(self._logprobs)
            frames.append(self._event("response.output_text.delta", **where, delta=text, logprobs=news))
        return frames

    def _begin_item(self, kind: str) -> list[bytes]:
        item = _reasoning(new_id("rs_"), "") if kind == "reasoning" else _message(new_id("msg_"), "", "in_progress")
        self._open = item
        added = self._event("response.output_item.added", output_index=len(self.output), item=_without_parts(item))
        if kind == "reasoning":
            part = {"type": "summary_text", "text": ""}
            return [
                added,
                self._event("response.reasoning_summary_part.added", **self._where("summary_index"), part=part),
            ]
        return [
            added,
            self._event("response.content_part.added", **self._where("content_index"), part=_output_text("")),
        ]

    def _end_item(self) -> list[bytes]:
        """Closes the open item: its text whole, its part, and the item itself."""
        item = self._open
        if item is None:
            return []
        text = "".join(self._text)
        if item["type"] == "reasoning":
            done, where = _reasoning(item["id"], text), self._where("summary_index")
            part = done["summary"][0]
            frames = [
                self._event("response.reasoning_summary_text.done", **where, text=text),
                self._event("response.reasoning_summary_part.done", **where, part=part),
            ]
        else:
            where = self._where("content_index")
            logprobs, self._logprobs, self._n_told = self._logprobs, [], 0
            done = _message(item["id"], text, "completed", logprobs)
            part = done["content"][0]
            frames = [
                self._event("response.output_text.done", **where, text=text, logprobs=logprobs),
                self._event("response.content_part.done", **where, part=part),
            ]
        self._open = None
        self._text = []
        return [*frames, self._finish_item(done)]

    def _call(self, call: ToolCall) -> list[bytes]:
        frames = self._end_item()
        item_id, arguments, index = new_id("fc_"), dumps(call.arguments), len(self.output)
        where = {"item_id": item_id, "output_index": index}
        begun = {**_function_call(item_id, call, ""), "status": "in_progress"}
        return [
            *frames,
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **where, delta=arguments),
            self._event("response.function_call_arguments.done", **where, name=call.name, arguments=arguments),
            self._finish_item(_function_call(item_id, call, arguments)),
        ]

    def _finish_item(self, item: dict[str, Any]) -> bytes:
        self.output.append(item)
        return self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _where(self, index: str) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.output), index: 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _response(self, status: str, finish: Finish | None) -> dict[str, Any]:
        """The response object; `finish` None while it runs."""
        job = self.job
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if finish is not None else None,
            "status": status,
            "incomplete_details": cut,
            "model": job.model,
            "previous_response_id": None,
            "instructions": self.instructions,
            "output": list(self.output),
            "error": None,
            "tools": self.tools,
            "tool_choice": _choice(job.tool_choice),
            "truncation": "disabled",
            "parallel_tool_calls": True,
            "text": {"format": self.text_format},
            "top_p": job.sampling.get("top_p", 1.0),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "top_logprobs": job.sampling.get("logprobs", 0),
            "temperature": job.sampling.get("temperature", 1.0),
            "reasoning": {"effort": job.think if isinstance(job.think, str) else None, "summary": None},
            "usage": _usage(finish) if finish is not None else None,
            "max_output_tokens": job.sampling.get("max_tokens"),
            "max_tool_calls": None,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": self.metadata,
            "safety_identifier": None,
            "prompt_cache_key": None,
        }


def _is_text(delta: Delta) -> bool:
    """Whether its tokens are of the message: also those that the reply parser still holds back."""
    return bool(delta.content) or not (delta.thinking or delta.tool_calls)


def _ending(finish: Finish) -> tuple[str, str]:
    """Status and last event of a finished answer."""
    if finish.reason == "length":
        return "incomplete", "response.incomplete"
    return "completed", "response.completed"


def _choice(choice: str) -> Any:
    return {"type": "function", "name": choice[1:]} if choice.startswith("=") else choice


def _output_text(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _message(item_id: str, text: str, status: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    content = [_output_text(text, logprobs)]
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def _reasoning(item_id: str, text: str) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": summary, "encrypted_content": None}


def _without_parts(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is announced: before its first part."""
    return {**item, "content" if item["type"] == "message" else "summary": []}


def _function_call(item_id: str, call: ToolCall, arguments: str) -> dict[str, Any]:
    names = {"call_id": call.id, "name": call.name, "arguments": arguments, "status": "completed"}
    return {"id": item_id, "type": "function_call", **names}


def _usage(finish: Finish) -> dict[str, Any]:
    details: dict[str, Any] = {"cached_tokens": finish.cached_tokens, "cache_write_tokens": 0}
    if finish.miss_reason:
        details["miss_reason"] = finish.miss_reason
    return {
        "input_tokens": finish.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": finish.new_tokens,
        "output_tokens_details": {"reasoning_tokens": finish.reasoning_tokens},
        "total_tokens": finish.prompt_tokens + finish.new_tokens,
    }
