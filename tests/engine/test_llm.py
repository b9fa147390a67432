"""The Python API over a scripted model."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from edgellm import LLM
from edgellm.config import EngineConfig, SamplingParams
from edgellm.engine.output import Completion, TokenEvent
from edgellm.engine.swap import SwapFile
from edgellm.engine.thread import Stream
from edgellm.errors import BackendUnavailable, ContextLengthError, EdgeLLMError, QueueFullError, RequestError
from tests.support.scripted import EOS, ByteTokenizer, ScriptedRunner, hash_script, model_config, scripted_llm
from tests.support.tiny import tiny_gguf

GREEDY = SamplingParams(temperature=0)


def test_answers_come_in_order_and_whole() -> None:
    with scripted_llm("Hello, wörld!") as llm:
        first, second = llm.generate(["one", [1, 2, 3]], GREEDY)
        assert first.text == second.text == "Hello, wörld!"
        assert first.ids == list("Hello, wörld!".encode())
        assert (first.finish_reason, first.prompt_tokens, second.prompt_tokens) == ("stop", 3, 3)


def test_a_stream_gives_what_generate_gives() -> None:
    with scripted_llm("Hello, wörld!") as llm:
        events = list(llm.stream("x", GREEDY))
        assert "".join(e.text for e in events) == "Hello, wörld!"
        assert [i for e in events for i in e.ids] == list("Hello, wörld!".encode())
        assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].completion is not None and events[-1].completion.text == "Hello, wörld!"


def test_a_stream_whose_events_go_elsewhere_says_so() -> None:
    """Instead of waiting for events that never come."""
    with scripted_llm("Hello!") as llm:
        events: list[TokenEvent] = []
        ended = threading.Event()
        stream = llm.submit("x", GREEDY, on_event=lambda e: (events.append(e), e.finish_reason and ended.set()))
        assert ended.wait(30) and "".join(e.text for e in events) == "Hello!"
        for wait in (stream.result, lambda: next(iter(stream))):
            with pytest.raises(RequestError, match="on_event"):
                wait()


def test_stop_strings_are_cut_off_and_never_streamed() -> None:
    with scripted_llm("one STOP two") as llm:
        for stop, text in ((("STOP",), "one "), (("TOP", "STO"), "one "), (("zzz",), "one STOP two")):
            events = list(llm.stream("x", SamplingParams(temperature=0, stop=stop, logprobs=0)))
            done = events[-1].completion
            assert done is not None
            assert (done.text, "".join(e.text for e in events)) == (text, text)
            assert b"".join(lp.bytes for lp in done.logprobs or ()) == text.encode()
            assert [i for e in events for i in e.ids] == done.ids == list(text.encode())


def test_b26_prompt_larger_than_the_context() -> None:
    with scripted_llm(hash_script, ctx=128) as llm:
        with pytest.raises(ContextLengthError, match=r"400 tokens.*128") as error:
            llm.generate([[1] * 400])
        assert (error.value.n_prompt, error.value.n_ctx) == (400, 128)
        with pytest.raises(ContextLengthError):
            llm.generate([[1] * 128])
        assert "one must stay free" in str(error.value)
        for ask in (llm.logits, lambda ids: llm.embed([ids], truncate=False)):  # they may fill the context
            assert len(ask([1] * 128)) in (128, 1)
            with pytest.raises(ContextLengthError, match=r"129 tokens but the context holds 128; shorten it"):
                ask([1] * 129)
        [last] = llm.generate([[1] * 127], GREEDY)
        assert (len(last.ids), last.finish_reason, last.prompt_tokens) == (1, "length", 127)


@pytest.mark.parametrize("max_tokens, expected", [(0, 0), (1, 1), (-1, 118), (-2, 118), (10**12, 118)])
def test_b27_num_predict_extremes(max_tokens: int, expected: int) -> None:
    with scripted_llm(hash_script, ctx=128) as llm:
        [done] = llm.generate([[1] * 10], SamplingParams(temperature=0, max_tokens=max_tokens))
        assert (len(done.ids), done.finish_reason) == (expected, "length")
        assert llm.generate("abc", SamplingParams(temperature=0, max_tokens=2))[0].finish_reason == "length"


def test_b27_minus_two_goes_past_the_end_token() -> None:
    def ends_at_once(tokens):
        row = np.zeros(512, np.float32)
        row[EOS], row[7] = 9.0, 8.0
        return row

    with scripted_llm(ends_at_once, ctx=64) as llm:
        [stops] = llm.generate("abc", SamplingParams(temperature=0, max_tokens=-1))
        assert (stops.ids, stops.finish_reason) == ([], "stop")
        [fills] = llm.generate("abc", SamplingParams(temperature=0, max_tokens=-2))
        assert (fills.ids, fills.finish_reason) == ([7] * 61, "length")
        [ignores] = llm.generate("abc", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        assert ignores.ids == [7] * 5


def test_wrong_prompts_are_refused_where_they_are_given() -> None:
    with scripted_llm("x") as llm:
        with pytest.raises(RequestError, match="no tokens"):
            llm.submit("")
        with pytest.raises(RequestError, match="token 512"):
            llm.submit([1, 512])
        with pytest.raises(RequestError, match="token -1"):
            llm.submit([-1])
        for wrong in ([1.5], [True], b"hi", [None], ["1"]):
            with pytest.raises(RequestError, match="text or a list of token ids"):
                llm.submit(wrong)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="params must be SamplingParams, not dict"):
            llm.generate("abc", {"max_tokens": 2})  # type: ignore[arg-type]
        for outside in (512, -1):
            with pytest.raises(RequestError, match=f"token {outside} is outside"):
                llm.detokenize([outside])
        with pytest.raises(RequestError, match="does not take tools"):
            llm.chat([{"role": "user", "content": "x"}], tools=[{"type": "function", "function": {"name": "f"}}])


def test_cancel_ends_within_a_step_and_gives_everything_back() -> None:
    with scripted_llm(hash_script, delay=0.002, ctx=4096, prefix_sharing=False) as llm:
        free = llm.engine.kv.pools[0].num_free
        stream = llm.submit([5] * 100, GREEDY)
        events = iter(stream)
        for _ in range(3):
            next(events)
        stream.cancel()
        rest = list(events)
        assert rest[-1].finish_reason == "abort"
        assert len(rest) <= 4
        assert llm.stats()["running"] == 0
        assert llm.engine.kv.pools[0].num_free == free


def test_leaving_a_stream_cancels_it() -> None:
    with scripted_llm(hash_script, delay=0.001, ctx=4096) as llm:
        for event in llm.stream([5] * 10, GREEDY):
            if event.ids:
                break
        deadline = time.monotonic() + 10
        while llm.stats()["running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert llm.stats()["finish_reasons"] == {"abort": 1}


def test_an_interrupted_chat_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(stream: Stream) -> Completion:
        next(iter(stream))
        raise KeyboardInterrupt

    with scripted_llm(hash_script, ctx=4096, delay=0.001) as llm:
        monkeypatch.setattr(Stream, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
        assert llm.stats()["finish_reasons"] == {"abort": 1}


def test_a_failing_step_ends_its_requests_and_no_other() -> None:
    def fails_on_seven(tokens):
        return RuntimeError("boom") if tokens[0] == 7 else hash_script(tokens)

    with scripted_llm(fails_on_seven, ctx=64) as llm:
        with pytest.raises(EdgeLLMError, match="boom"):
            llm.generate([[7, 7]], GREEDY)
        assert len(llm.generate([[8]], SamplingParams(temperature=0, max_tokens=4))[0].ids) == 4


def test_b23_nan_logits_end_one_request_only() -> None:
    def nan_for_seven(tokens):
        row = hash_script(tokens)
        if tokens[0] == 7 and len(tokens) > 3:
            row[9] = np.nan
        return row

    with scripted_llm(nan_for_seven, ctx=64) as llm:
        good, bad = llm.submit([8], GREEDY), llm.submit([7], GREEDY)
        with pytest.raises(RequestError, match="NaN"):
            bad.result()
        assert len(good.result().ids) == 63


def test_the_queue_is_bounded() -> None:
    with scripted_llm(hash_script, delay=0.02, max_seqs=1, max_waiting=2) as llm:
        streams = [llm.submit([1], GREEDY)]
        next(iter(streams[0]))
        streams += [llm.submit([1], GREEDY) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests"):
            llm.submit([1], GREEDY)
        for stream in streams:
            stream.cancel()
        assert streams[2].result().finish_reason == "abort"


def test_many_threads_submit_at_once() -> None:
    with scripted_llm(hash_script, max_seqs=8) as llm:
        expected = [llm.generate([[i + 1] * 5], SamplingParams(temperature=0, max_tokens=8))[0].ids for i in range(8)]
        found: dict[int, list[int]] = {}

        def ask(i: int) -> None:
            found[i] = llm.generate([[i + 1] * 5], SamplingParams(temperature=0, max_tokens=8))[0].ids

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(8)] == expected


def test_logits_of_all_positions() -> None:
    ids = list(range(1, 101))
    with scripted_llm(hash_script, ctx=128, max_batch_tokens=16) as llm:
        llm.generate([ids], SamplingParams(temperature=0, max_tokens=2))  # a cached prefix must not shorten the result
        logits = llm.logits(ids)
        assert logits.shape == (100, 512)
        assert all(np.array_equal(logits[i], hash_script(ids[: i + 1])) for i in range(100))


def test_a_stopped_engine_keeps_nobody_waiting() -> None:
    """Neither those it was computing for, one of whom does not listen, nor those whose orders it had not begun."""
    begun, stopping, told, counted = (threading.Event() for _ in range(4))

    def stops(tokens):
        begun.set()
        assert stopping.wait(30)
        raise SystemExit("broken")

    def refuse(event: TokenEvent) -> None:
        raise ValueError("not listening")

    llm = scripted_llm(stops)
    saved: list[str] = []
    llm.engine.before_close.append(lambda: saved.append("blocks that may be wrong"))
    first, _ = llm.submit([1], GREEDY, on_event=refuse), begun.wait(30)
    second, late = llm.submit([2], GREEDY), list[TokenEvent]()
    llm.submit([3], GREEDY, on_event=lambda event: (late.append(event), told.set()))
    threading.Thread(target=lambda: (llm.stats(), counted.set()), daemon=True).start()
    while len(llm._thread._orders) < 3:
        time.sleep(0.001)
    stopping.set()
    assert told.wait(10) and counted.wait(10)
    assert [str(event.error) for event in late] == ["the engine stopped: broken"]
    with pytest.raises(EdgeLLMError, match="the engine stopped: broken"):
        second.result()
    first.cancel()
    for _ in range(600):  # more than may wait: what is refused is not counted as waiting
        with pytest.raises(EdgeLLMError, match="the engine has stopped: broken"):
            llm.submit([4])
    llm.close()
    assert llm.engine.runner.closed and not saved  # type: ignore[attr-defined]


def test_a_listener_that_fails_where_its_request_is_refused_ends_no_other() -> None:
    heard: list[str] = []

    def refuse(event: TokenEvent) -> None:
        heard.append(str(event.error))
        raise ValueError("not listening")

    def no_grammar() -> object:
        raise ValueError("no such rule")

    with scripted_llm("Hello!") as llm:
        llm.submit([1], SamplingParams(grammar=no_grammar), on_event=refuse)
        assert llm.generate("x", GREEDY)[0].text == "Hello!"
        assert heard == ["the request failed: no such rule"]


def test_a_text_that_cannot_be_embedded_cancels_the_others() -> None:
    with scripted_llm(hash_script, ctx=64) as llm:
        held, release = threading.Event(), threading.Event()
        holder = threading.Thread(target=llm.on_engine, args=(lambda: (held.set(), release.wait(30)),))
        holder.start()
        assert held.wait(30)
        with pytest.raises(ContextLengthError):
            llm.embed([[1] * 8, [1] * 65], truncate=False)
        release.set()
        holder.join()
        assert llm.stats()["finish_reasons"] == {"abort": 1}


def test_statistics_of_a_model_whose_file_was_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    with LLM(path, backend="reference", memory=1 << 30) as llm:
        path.rename(tmp_path / "elsewhere.gguf")
        assert [llm.stats()["planned_bytes"] for _ in range(2)] == [None] * 2
        assert caplog.text.count("stats without planned_bytes") == 1
        assert len(llm.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True))[0].ids) == 2
    with LLM(tmp_path / "elsewhere.gguf", backend="reference", memory=1 << 30) as llm:
        assert llm.stats()["planned_bytes"] > 0


def test_the_swap_space_is_given_back_on_close(tmp_path: Path) -> None:
    with LLM(tiny_gguf(tmp_path / "tiny.gguf"), backend="reference", memory=1 << 30, swap_space=1 << 20) as llm:
        space = llm.engine.scheduler.swap
        assert isinstance(space, SwapFile) and not any(file.closed for file in space._files)
    assert space._files and all(file.closed for file in space._files)


def test_closing_ends_what_runs() -> None:
    llm = scripted_llm(hash_script, delay=0.005, ctx=4096)
    stream = llm.submit([1], GREEDY)
    next(iter(stream))
    llm.close()
    assert stream.result().finish_reason == "abort"
    with pytest.raises(EdgeLLMError, match="closed"):
        llm.submit([1])
    llm.close()


@pytest.mark.parametrize("ask", [lambda llm: llm.logits([1] * 200), lambda llm: llm.embed([[1] * 200])])
def test_rows_of_a_text_half_computed_when_the_model_closes_are_an_error(ask) -> None:
    """Not the rows of its beginning, nor a vector made of them."""

    def closes(tokens):  # from the engine's thread, so it takes effect after the step
        llm.close()
        return hash_script(tokens)

    llm = scripted_llm(closes, max_batch_tokens=16)
    with pytest.raises(EdgeLLMError, match="closed before"):
        ask(llm)


def test_a_system_without_threads_gets_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    runner = ScriptedRunner(hash_script, model_config())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(BackendUnavailable, match="engine's thread cannot be started"):
        LLM.from_parts(EngineConfig(ctx=64), model_config(), runner, ByteTokenizer())
    assert runner.closed


def test_a_callback_cannot_wait_for_its_own_model() -> None:
    """It runs on the thread that would have to answer: an error instead of waiting for ever."""
    with scripted_llm("Hello!") as llm:

        def grammar() -> None:
            with pytest.raises(RequestError, match="another thread"):
                llm.stats()
            llm.generate(["x"], GREEDY)

        with pytest.raises(RequestError, match="a callback of the model cannot wait for the same model"):
            llm.generate(["x"], SamplingParams(grammar=grammar))
        assert llm.generate(["x"], GREEDY)[0].text == "Hello!"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_open_the_model_again() -> None:
    """It has no engine thread: it would wait for ever, as pools of `multiprocessing` then do."""
    with scripted_llm("Hello!") as llm:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                for call in (lambda: llm.generate(["x"]), llm.stats, lambda: next(llm.stream("x"))):
                    with pytest.raises(EdgeLLMError, match="open it again in this process"):
                        call()
                llm.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert llm.generate(["x"], GREEDY)[0].text == "Hello!"
