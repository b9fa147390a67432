"""What belongs to one request beside its place in the schedule: sampler, text, times, and why it ended."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.config import SamplingParams
from edgellm.engine.output import Completion, TextOutput, TokenEvent, TokenLogprobs, TokenText
from edgellm.engine.request import Request
from edgellm.engine.sampler import Sampler, log_softmax_at, top_ids
from edgellm.engine.tally import Tally
from edgellm.errors import EdgeLLMError

__all__ = ["Answer"]

Rows = npt.NDArray[np.float32]


class Answer:
    """Turns a request's output rows into tokens and text. Times are `time.perf_counter()` seconds."""

    def __init__(self, request: Request, params: SamplingParams, tokenizer: TokenText, show: Container[int] = ()):
        self.request = request
        self.params = params
        self.tokenizer = tokenizer
        self.ignores_end = params.ignore_eos or params.max_tokens == -2
        banned = {i: -float("inf") for i in tokenizer.eog_ids} if self.ignores_end else {}
        if banned:
            params = replace(params, logit_bias={**(params.logit_bias or {}), **banned})
        self.sampler = Sampler(params, request.token_ids)
        self.output = TextOutput(tokenizer.stream_decoder(request.token_ids[-1], show), params.stop)
        self.rows: list[Rows] = []
        """Results of requests that want rows instead of tokens."""
        self.finish_reason: str | None = None
        self.error: EdgeLLMError | None = None
        self.guesses = Tally()
        self.speculating = False
        """Whether guesses are made for this request; then `speedup` says what they gained against plain decoding."""
        self.speedup: float | None = None
        self.arrived = time.perf_counter()
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None

    def accept(self, rows: Rows, drafts: Sequence[int], picks: Sequence[tuple[float, int]] = ()) -> list[int]:
        """Tokens that follow from logits (1 + len(drafts), vocab): each row's own choice, for as long as it equals
        the draft the next row was computed with. Plain decoding is the case without drafts. `picks`: of each row its
        largest logit and the id that has it, where that is known.

        Every token is drawn from the target's own distribution with the request's own generator, so drafts change
        neither the distribution nor, for a seed, the tokens. Ends inside the run where the answer ends."""
        tokens: list[int] = []
        accepted = 0
        for i, row in enumerate(rows):
            token = self.sampler.sample(row, picks[i] if picks else None)
            tokens.append(token)
            self._take(token, row)
            if i == len(drafts) or token != drafts[i]:
                break
            accepted += 1
            if self.finish_reason:
                break
        self.guesses.count(len(drafts), accepted)
        return tokens

    def close(self, reason: str, error: EdgeLLMError | None = None) -> None:
        """The answer ends here, if it has not already."""
        self.finish_reason = self.finish_reason or reason
        self.error = self.error or error
        self.output.finish()

    def event(self) -> TokenEvent | None:
        """News since the last call; None when there are none."""
        text, ids, logprobs = self.output.take()
        if not (text or ids or self.finish_reason):
            return None
        kept = logprobs if self.params.logprobs is not None else None
        done = self.completion() if self.finish_reason else None
        return TokenEvent(text, ids, kept, self.finish_reason, done, self.error)

    def completion(self) -> Completion:
        """The whole answer so far."""
        return Completion(
            text=self.output.text,
            ids=list(self.output.ids),
            finish_reason=self.finish_reason or "",
            prompt_tokens=self.request.num_prompt_tokens,
            cached_tokens=self.request.num_cached_tokens,
            logprobs=list(self.output.logprobs) if self.params.logprobs is not None else None,
            timings=self.timings(),
            stop=self.output.stop,
        )

    def timings(self) -> dict[str, Any]:
        """See `Completion.timings`. Spans that have not begun are left out."""
        now = time.perf_counter()
        n = self.request.num_new_tokens
        times: dict[str, Any] = {"total_s": now - self.arrived, "preemptions": self.request.num_preemptions}
        times["queue_s"] = (self.started or now) - self.arrived
        times["seed"] = self.sampler.seed
        if self.request.cache_miss:
            times["miss_reason"] = self.request.cache_miss
        if self.speculating:
            times["speculation"] = self.speculation()
        if self.first_token is not None and self.last_token is not None:
            times["ttft_s"] = self.first_token - self.arrived
            times["prefill_s"] = self.first_token - (self.started or self.arrived)
            times["decode_s"] = self.last_token - self.first_token
            if n > 1:
                times["tpot_s"] = times["decode_s"] / (n - 1)
        elif self.started is not None:
            times["prefill_s"] = now - self.started
        return times

    def speculation(self) -> dict[str, Any]:
        """Guesses made and accepted: in total, the share by position in the run, and how many per verification."""
        return {**self.guesses.report(), "speedup": self.speedup}

    def _take(self, token: int, row: Rows) -> None:
        """Count a chosen token; sets `finish_reason` where it is the last."""
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        complete = self.sampler.advance(token)
        if token in self.tokenizer.eog_ids and not self.ignores_end:
            self.close("stop")
            return
        stopped = self.output.push(token, self._logprobs(token, row))
        if stopped or complete:
            self.close("stop")
        elif len(self.output.ids) >= self.request.max_tokens:
            self.close("length")

    def _logprobs(self, token: int, row: Rows) -> TokenLogprobs | None:
        if self.params.logprobs is None:
            return None
        ids = np.concatenate([[token], top_ids(row, self.params.logprobs)]).astype(np.int64)
        values = log_softmax_at(row, ids)
        chosen, *top = (self._entry(int(i), float(v)) for i, v in zip(ids, values, strict=True))
        return replace(chosen, top=tuple(top))

    def _entry(self, token: int, logprob: float) -> TokenLogprobs:
        data = self.tokenizer.token_bytes(token)
        return TokenLogprobs(token, data.decode("utf-8", "replace"), data, min(0.0, logprob))
