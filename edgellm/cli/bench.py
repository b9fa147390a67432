"""`edgellm bench`: speed, the bytes it moves, and the share of the machine's bandwidth that is."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.compile_bar import CompileBar
from edgellm.cli.machine import default_threads, peak_rss_bytes
from edgellm.cli.opening import model_path, open_llm
from edgellm.cli.options import ModelFlags, json_option, plain_model_options
from edgellm.config import EngineConfig
from edgellm.errors import RequestError
from edgellm.hub.child import python_command

if TYPE_CHECKING:
    from edgellm.measure.bench import BenchResult

__all__ = ["bench"]


class IntList(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers from `least` to `most`, separated by commas."""

    name = "list"

    def __init__(self, least: int = 0, most: int = 1 << 30):
        self.least, self.most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers, or wrong usage."""
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 0,4096", param, ctx)
        if not self.least <= min(numbers) <= max(numbers) <= self.most:
            self.fail(f"{value!r} holds a number outside {self.least} to {self.most}", param, ctx)
        return numbers


@click.command()
@click.argument("model")
@click.option("--prompt", type=click.IntRange(0), default=512, show_default=True, help="Prompt tokens; 0: skip.")
@click.option("--gen", type=click.IntRange(0), default=128, show_default=True, help="Tokens to decode; 0: skip.")
@click.option("--depth", type=IntList(), default="0", show_default=True, help="Positions filled before decoding.")
@click.option(
    "--batch", type=IntList(1, EngineConfig.max_seqs), default="1", show_default=True, help="Sequences decoded at once."
)
@click.option("--rows", type=IntList(), default="0", show_default=True, help="Rows of one sequence in one pass.")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw decoding speed into this PNG file.")
@plain_model_options
@json_option
def bench(
    model: str,
    prompt: int,
    gen: int,
    depth: tuple[int, ...],
    batch: tuple[int, ...],
    rows: tuple[int, ...],
    runs: int,
    plot: Path | None,
    model_flags: ModelFlags,
    as_json: bool,
) -> None:
    """Measure MODEL: `ppN` processes a prompt of N, `tgN` decodes N tokens per sequence, `rowsK` is one pass over K
    tokens with logits for all. --depth, --batch and --rows take lists such as 0,4096."""
    from edgellm.engine.model_runner import ModelRunner
    from edgellm.loader import open_gguf
    from edgellm.measure.bench import BenchPlan, longest_sequence, run_bench

    plan = BenchPlan(prompt, gen, depth, batch, rows, runs)
    if plot is not None:
        _check_plot(plot, gen)
    path, needed = model_path(model), longest_sequence(plan)
    # In a process of its own, so that its gigabyte is not part of this one's peak memory.
    bandwidth = _bandwidth(model_flags.threads or default_threads())
    results: list[BenchResult] = []
    bar = CompileBar()
    started = time.perf_counter()
    flags = replace(model_flags, ctx=max(needed, model_flags.ctx or 0))
    with open_llm(model, flags, progress=bar) as llm, open_gguf(path) as gguf:
        load_s = time.perf_counter() - started
        for result in run_bench(llm, gguf.tensors, plan, bandwidth, _progress):
            results.append(result)
            if not as_json:
                _print_line(result, header=len(results) == 1)
        huge = llm.settle()
        assert isinstance(llm.engine.runner, ModelRunner)
        backend = llm.engine.runner.backend
        facts = {
            "model": model,
            "backend": backend.name,
            "threads": getattr(backend, "threads", 1),
            "kv_type": llm.engine.config.kv_type,
            "results": [result.as_json() for result in results],
            "bandwidth_gb_s": round(bandwidth, 2),
            "rss_mb": round(peak_rss_bytes() / 1e6, 1),
            "load_s": round(load_s, 3),
            "compile_s": round(bar.seconds, 3),
        }
    if as_json:
        click.echo(json.dumps(facts))
    else:
        words = (
            "bandwidth {bandwidth_gb_s} GB/s, peak memory {rss_mb} MB, loaded in {load_s} s, compiled for {compile_s} s"
        )
        click.echo(words.format(**facts) + ("" if huge is None else f", {huge:.0%} of the file's pages huge"))
    if plot is not None:
        _plot(results, plot, model)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"measuring {text} ...", err=True)


def _bandwidth(threads: int) -> float:
    code = f"from edgellm.backends.cpu.bandwidth import measure_bandwidth; print(measure_bandwidth({threads}))"
    done = subprocess.run(python_command(code), capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"its process ended with {done.returncode}"
        raise RequestError(f"the bandwidth could not be measured: {reason}")
    return float(done.stdout) / 1e9


def _print_line(result: BenchResult, header: bool) -> None:
    if header:
        click.echo(
            f"{'test':<8} {'depth':>6} {'batch':>5} {'tokens/s':>10} {'spread':>7} {'GB/s':>7} {'of bandwidth':>13}"
        )
    spread = (max(result.runs) - min(result.runs)) / result.tok_s
    share = "" if result.roofline is None else f"{result.roofline:.0%}"
    click.echo(
        f"{result.test:<8} {result.depth:>6} {result.batch:>5} {result.tok_s:>10.1f} {spread:>7.0%} "
        f"{result.gb_s:>7.2f} {share:>13}"
    )


def _check_plot(path: Path, gen: int) -> None:
    """What would spoil the drawing is said now, not after minutes of measuring."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("--plot needs matplotlib: pip install matplotlib")
    if not gen:
        raise RequestError("--plot draws decoding speed, and --gen 0 switched it off")
    if not path.parent.is_dir():
        raise RequestError(f"--plot {path}: there is no folder {path.parent}")


def _plot(results: list[BenchResult], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    decoding = [result for result in results if result.n_gen]
    figure, (over_depth, over_batch) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axes, across, along in ((over_depth, "depth", "batch"), (over_batch, "batch", "depth")):
        for fixed in sorted({getattr(result, along) for result in decoding}):
            line = sorted((getattr(r, across), r.tok_s) for r in decoding if getattr(r, along) == fixed)
            axes.plot(*zip(*line, strict=True), marker="o", label=f"{along} {fixed}")
        axes.set_xlabel(across)
        axes.set_ylim(bottom=0)
        axes.legend()
    over_depth.set_ylabel("tokens/s")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
