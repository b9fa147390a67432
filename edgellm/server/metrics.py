"""What /metrics shows, in Prometheus' text format: counted here per request, read from the engines when asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edgellm.errors import EdgeLLMError
from edgellm.memory import block_bytes
from edgellm.server.job import Finish
from edgellm.server.manager import LoadedModel, ModelManager

__all__ = ["CONTENT_TYPE", "Metrics", "engine_stats", "measured_bytes"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAUGES = {
    "running": "Requests being computed",
    "waiting": "Requests waiting in the model's queue",
    "kv_blocks_used": "KV blocks held by running requests",
    "kv_blocks_cached": "KV blocks kept for prefixes that may come again",
    "kv_blocks_total": "KV blocks in the pool",
    "tokens_per_s": "Generated tokens per second of computing, since the model was loaded",
}
_COUNTERS = {
    "preemptions": "Requests put back into the queue for want of blocks",
    "drafted_tokens": "Tokens proposed by speculation",
    "accepted_tokens": "Proposed tokens that were accepted",
}


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self, manager: ModelManager):
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"edgellm_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"edgellm_{name}", text, ("model",), registry=self.registry, buckets=_SECONDS)

        self.requests = counter("requests", "Answers to HTTP requests", "path", "status")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, cached ones included", "model")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in the prefix cache", "model")
        self.new_tokens = counter("generated_tokens", "Tokens generated", "model")
        self.ends = counter("finished", "Finished answers", "model", "reason")
        self.ttft = histogram("time_to_first_token_seconds", "From request to first token")
        self.tpot = histogram("time_per_output_token_seconds", "Mean gap between tokens")
        self.registry.register(_EngineCollector(manager))

    def finished(self, model: str, finish: Finish, ttft: float) -> None:
        """Counts one answer. `ttft`: seconds from request to first token."""
        self.prompt_tokens.labels(model).inc(finish.prompt_tokens)
        self.cached_tokens.labels(model).inc(finish.cached_tokens)
        self.new_tokens.labels(model).inc(finish.new_tokens)
        self.ends.labels(model, finish.reason).inc()
        self.ttft.labels(model).observe(ttft)
        if finish.new_tokens > 1:
            self.tpot.labels(model).observe(finish.decode_s / (finish.new_tokens - 1))

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads every loaded engine's `stats()` when the page is asked for. That may wait for a step of the engine."""

    def __init__(self, manager: ModelManager):
        self._manager = manager

    def collect(self) -> Iterable[Metric]:
        """One family per figure, one sample per model."""
        found = [(model.record.name, engine_stats(model)) for model in self._manager.loaded()]
        yield GaugeMetricFamily("edgellm_loaded_models", "Models in memory", value=len(found))
        yield GaugeMetricFamily("edgellm_load_queue", "Requests waiting for a load", value=self._manager.waiting)
        for name, text in _GAUGES.items():
            yield self._family(GaugeMetricFamily(f"edgellm_{name}", text, labels=("model",)), name, found)
        for name, text in _COUNTERS.items():
            yield self._family(CounterMetricFamily(f"edgellm_{name}", text, labels=("model",)), name, found)

    @staticmethod
    def _family(family: Any, name: str, found: list[tuple[str, dict[str, Any]]]) -> Metric:
        for model, stats in found:
            if isinstance(stats.get(name), (int, float)):
                family.add_metric((model,), stats[name])
        return family  # type: ignore[no-any-return]


def engine_stats(model: LoadedModel) -> dict[str, Any]:
    """A model's `stats()` with its block pools summed up; empty when it was closed meanwhile."""
    llm = model.llm  # another thread may let it go at any time
    if llm is None:
        return {}
    try:
        stats = dict(llm.stats())
    except EdgeLLMError:
        return {}
    groups = stats.get("cache_groups", ())
    stats["kv_blocks_total"] = sum(group["blocks"] for group in groups)
    stats["kv_blocks_used"] = sum(group["used"] for group in groups)
    stats["kv_blocks_cached"] = sum(group["cached"] for group in groups)
    return stats


def measured_bytes(model: LoadedModel) -> int:
    """Bytes a model holds now: its mapped file, and the KV blocks that hold rows (scratch comes and goes)."""
    llm = model.llm
    groups = engine_stats(model).get("cache_groups")
    if llm is None or not groups:
        return model.record.size
    config = llm.engine.config
    sizes = block_bytes(llm.config, config.kv_type, config.block_size)
    blocks = [int(group["used"] + group["cached"]) for group in groups]
    return model.record.size + sum(n * size for n, size in zip(blocks, sizes, strict=True))
