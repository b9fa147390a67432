"""Whether a model fits a machine, and how fast it can be at best, from its header alone.

A model that is not here yet is judged from the first bytes of its files, read by range requests: a few hundred kB to a
few MB of a download of many GB. The arithmetic of weights, KV cache and scratch is `edgellm.memory`, which the engine
itself obeys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgellm import memory
from edgellm.errors import EdgeLLMError, GGUFError, PullError, UnsupportedModel
from edgellm.hub.fetch import Fetcher, RangeIgnored
from edgellm.hub.machines import Machine
from edgellm.hub.sources import RemoteFile, RemoteModel
from edgellm.hub.web import Web
from edgellm.loader import Header, Incomplete, TensorInfo, open_gguf, parse_header
from edgellm.memory import MemoryPlan
from edgellm.models.config import ModelConfig

__all__ = ["ModelFacts", "Plan", "local_facts", "make", "remote_facts"]

_FIRST = 256 << 10
_LARGEST_HEADER = 256 << 20
_BASE_RUNTIME, _BYTES_PER_TOKEN = 100_000_000, 290
"""Measured on Linux, x86-64, Python 3.11 (`edgellm doctor` shows this machine's own figure for the first)."""
_QUANTS = {"Q8_0": 8.5, "Q6_K": 6.57, "Q5_K_M": 5.7, "Q4_K_M": 4.87, "Q3_K_M": 3.93, "Q2_K": 3.2}
"""Bits per weight of whole files of 7B to 70B models, embeddings included: for advice only, so marked as about."""


@dataclass(frozen=True)
class ModelFacts:
    """What a plan needs to know of a model."""

    name: str
    config: ModelConfig
    tensors: tuple[TensorInfo, ...]
    vocab_size: int

    @property
    def weights_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors)

    @property
    def n_weights(self) -> int:
        """Number of weights."""
        return sum(math.prod(info.shape) for info in self.tensors)

    @property
    def bytes_per_token(self) -> float:
        """Weight bytes that one new token reads: all, but of an embedding that is no output head too one row, and of
        a layer's experts those that are used."""
        names = {info.name for info in self.tensors}
        tied = "output.weight" not in names
        total = 0.0
        for info in self.tensors:
            if info.name == "token_embd.weight" and not tied:
                total += info.nbytes / max(info.shape[0], 1)
            elif "_exps." in info.name and self.config.n_experts and not self.config.skips(info.name):
                total += info.nbytes * self.config.n_experts_used / self.config.n_experts
            elif not self.config.skips(info.name):
                total += info.nbytes
        return total


@dataclass(frozen=True)
class Plan:
    """A verdict with its numbers, all in bytes. `tok_s_ceiling`: from bandwidth alone, with an empty cache."""

    memory: MemoryPlan
    kv_type: str
    machine: str
    tok_s_ceiling: float | None
    trained_ctx: int
    advice: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The fields of `plan --json`."""
        facts = asdict(self.memory)
        ceiling = self.tok_s_ceiling
        facts["tok_s_ceiling"] = None if ceiling is None else round(ceiling, 2)
        return {**facts, "kv_type": self.kv_type, "machine": self.machine, "advice": list(self.advice)}


def make(
    facts: ModelFacts,
    machine: Machine | None = None,
    ctx: int | None = None,
    kv_type: str = "f16",
    draft: ModelFacts | None = None,
    budget: int | None = None,
    bandwidth: float | None = None,
) -> Plan:
    """Plans one conversation of `ctx` tokens (None: the trained length, or what fits). `machine` None: this one, with
    its `budget` (None: what the engine would take) and measured `bandwidth` in bytes per second."""
    if budget is None:
        budget = machine.budget if machine else memory.default_budget()
    if machine is not None and bandwidth is None:
        bandwidth = machine.bandwidth
    fixed = {"draft_bytes": _draft_bytes(draft, ctx, kv_type), "runtime_bytes": _expected_runtime(facts)}

    def planned(kv: str, length: int | None) -> MemoryPlan:
        return memory.make_plan(facts.config, facts.weights_bytes, kv, length, budget, **fixed, n_logits=1)

    plan = planned(kv_type, ctx)
    advice: list[str] = []
    if not plan.fits:
        wanted = ctx or plan.ctx
        if kv_type != "q8_0" and planned("q8_0", wanted).fits:
            advice.append(f"--kv-type q8_0 would fit {wanted} tokens")
        if plan.max_ctx:
            advice.append(f"--ctx {plan.max_ctx} would fit")
        room = budget - (plan.total_bytes - plan.weights_bytes)
        quant = _quant_that_fits(facts, room)
        if quant:
            advice.append(f"a smaller quantisation would fit ({quant}, about {_bits(quant, facts) / 1e9:.1f} GB)")
        elif not advice:
            advice.append("no quantisation of this model fits; choose one with fewer weights")
    ceiling = bandwidth / facts.bytes_per_token if bandwidth and facts.tensors else None
    label = machine.name if machine else "this machine"
    return Plan(plan, kv_type, label, ceiling, facts.config.context_length, tuple(advice))


def _expected_runtime(facts: ModelFacts) -> int:
    """Bytes that the process takes besides: interpreter, libraries and compiled kernels, and the tokenizer's tables."""
    return _BASE_RUNTIME + _BYTES_PER_TOKEN * facts.vocab_size


def local_facts(path: Path, name: str = "") -> ModelFacts:
    """Facts of a file (or split model) that is here. Raises GGUFError, UnsupportedModel."""
    with open_gguf(path) as model:
        return _facts(name or path.name, model.metadata, tuple(model.tensors.infos()))


def remote_facts(web: Web, remote: RemoteModel) -> ModelFacts:
    """Facts of a model somewhere else, from its files' headers. Raises PullError, GGUFError, UnsupportedModel."""
    if not remote.model_files:
        raise UnsupportedModel(f"{remote.name} holds no GGUF file, so edgellm cannot run it")
    headers = [read_remote_header(web, file, str(remote.name)) for file in remote.model_files]
    tensors = tuple(info for header in headers for info in header.tensors)
    return _facts(str(remote.name), headers[0].metadata, tensors)


def read_remote_header(web: Web, file: RemoteFile, label: str) -> Header:
    """Reads as much of a remote file as its header needs, doubling what was read each time it was too little."""
    import threading

    size = file.layer.size
    fetcher = Fetcher(web, file.locate, size, threading.Event())
    data = bytearray()
    wanted = min(_FIRST, size)
    while True:
        try:
            fetcher.read_range(len(data), wanted, data.extend)
        except RangeIgnored:
            data = fetcher.read_beginning(wanted)
        try:
            return parse_header(bytes(data), size, label)
        except Incomplete as short:
            if short.needed > _LARGEST_HEADER:
                raise GGUFError(f"{label}: its header is longer than {_LARGEST_HEADER} bytes") from None
            wanted = min(max(short.needed, 2 * len(data)), size)


def verdict(facts: ModelFacts, plan: Plan) -> str:
    """One line for people."""
    m = plan.memory
    if m.fits:
        return f"{facts.name} fits {plan.machine}: {m.total_bytes / 1e9:.2f} of {m.budget_bytes / 1e9:.2f} GB"
    lacking = (m.total_bytes - m.budget_bytes) / 1e9
    return f"{facts.name} does not fit {plan.machine}: {lacking:.2f} GB too much for {m.budget_bytes / 1e9:.2f} GB"


def machines_that_fit(
    facts: ModelFacts,
    machines: Sequence[Machine],
    ctx: int | None,
    kv_type: str,
    draft: ModelFacts | None = None,
    budget: int | None = None,
) -> list[str]:
    """Names of the machines on which the model fits at `ctx` tokens, within `budget` where that is less than what the
    machine allows."""

    def fits(machine: Machine) -> bool:
        room = machine.budget if budget is None else min(budget, machine.budget)
        return make(facts, machine, ctx, kv_type, draft, room).memory.fits

    return [machine.name for machine in machines if fits(machine)]


def _facts(name: str, metadata: Mapping[str, Any], tensors: tuple[TensorInfo, ...]) -> ModelFacts:
    from dataclasses import replace

    from edgellm.models.registry import config_from_metadata

    config = config_from_metadata(metadata)
    rows = next((info.shape[0] for info in tensors if info.name == "token_embd.weight"), 0)
    vocab_size = config.vocab_size or rows
    return ModelFacts(name, replace(config, vocab_size=vocab_size), tensors, vocab_size)


def _draft_bytes(draft: ModelFacts | None, ctx: int | None, kv_type: str) -> int:
    if draft is None:
        return 0
    length = min(ctx or draft.config.context_length, draft.config.context_length)
    return draft.weights_bytes + memory.kv_bytes(draft.config, length, kv_type)


def _bits(quant: str, facts: ModelFacts) -> float:
    return facts.n_weights * _QUANTS[quant] / 8


def _quant_that_fits(facts: ModelFacts, room: int) -> str:
    """The best usual quantisation that is smaller than what there is and fits `room` bytes."""
    sizes = {quant: _bits(quant, facts) for quant in _QUANTS}
    return next((q for q, n in sizes.items() if n <= room and n < facts.weights_bytes), "")


def why_not(error: EdgeLLMError) -> str:
    """For a pull that goes on without a plan: the reason, in one line."""
    kind = "edgellm cannot run it" if isinstance(error, UnsupportedModel) else "no plan could be made"
    return f"{kind}: {error}" if not isinstance(error, PullError) else str(error)
